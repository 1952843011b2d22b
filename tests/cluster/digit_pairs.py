"""A small text to translate: four-digit numbers, digit by digit, English and German.

A few dozen updates suffice to learn it.
"""

import numpy as np

DIGITS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
}
NUMBERS = np.random.default_rng(0).permutation(9000)[:1200] + 1000


def lines(language, numbers=NUMBERS):
    return [" ".join(DIGITS[language][int(digit)] for digit in str(number)) for number in numbers]


def text(of):
    return "".join(f"{line}\n" for line in of)
