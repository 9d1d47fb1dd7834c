"""What do the rules of a data build cost, do they agree with other tools, and what do they find?"""
