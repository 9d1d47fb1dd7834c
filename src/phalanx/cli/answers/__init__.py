"""How commands answer: words for people, one JSON object for programs, and a page for each error."""
