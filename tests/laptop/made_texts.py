"""A folder of text with headings, made of a few words; the same on every machine."""

import hashlib

WORDS = ("river", "stone", "bridge", "market", "harbour", "lantern", "winter", "garden", "letter", "copper", "signal")


def sentence(number):
    digest = hashlib.sha256(str(number).encode()).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[:12]).capitalize() + "."


def write_texts(folder, num_sections=60):
    """Write a file of sections; each has a heading and two paragraphs of about 450 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for section in range(num_sections):
        paragraphs = [" ".join(sentence(section * 100 + part * 10 + at) for at in range(5)) for part in range(2)]
        heading = f"The {WORDS[section % len(WORDS)]} of part {section}"
        sections.append("\n\n".join([f"# {heading}", *paragraphs]))
    (folder / "book.md").write_text("\n\n".join(sections))
    return folder
