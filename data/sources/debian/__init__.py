"""How does text in two languages come out of the packages of a Debian archive?"""
