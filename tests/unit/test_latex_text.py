"""Any text as LaTeX: balanced groups, nothing special left raw, accepted by pdflatex."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latex_documents import compiled, needs_pdflatex, problems

from crosstrain.report.pages.paper_figures import MAX_CHARACTERS, comment, label, latex_text

NASTY = st.sampled_from(
    [*"&%$#_{}~^\\<>|\"-`',[]*?! ", "é", "ß", "中", "β", "±", "†", "\u202e", "\u200f", "\x1b", "\n", "\t", "\x00", "🙂"]
)
TEXTS = st.text(NASTY, max_size=60) | st.text(max_size=60)


@given(TEXTS, st.booleans())
def test_latex_has_balanced_groups_and_no_raw_specials(text, breakable):
    assert problems(latex_text(text, breakable)) == []


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("a_b&c%d$e#f{g}", r"a\_b\&c\%d\$e\#f\{g\}"),
        ("~^\\<>|", r"\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}\textgreater{}\textbar{}"),
        ("--batch ''", r"-{}-batch '{}'"),
        ("[1]*", "{[}1{]}{*}"),
        ("é ç ï Å", r"\'{e} \c{c} \"{\i{}} \r{A}"),
        ("α Ω", r"$\alpha$ U+03A9"),
        ("中\u202e\x1b\n", r"U+4E2D\textbackslash{}u202e\textbackslash{}x1b\textbackslash{}x0a"),
    ],
)
def test_special_characters_are_escaped(text, latex):
    assert latex_text(text) == latex


def test_long_text_is_cut_and_long_words_may_break():
    assert latex_text("x" * 10_000) == "x" * MAX_CHARACTERS + r"\ldots{}"
    assert max(map(len, latex_text("x" * 300, breakable=True).split(r"\allowbreak{}"))) <= 16


@given(TEXTS)
def test_comment_is_one_line_and_label_is_plain(text):
    assert len(comment(text).splitlines()) == 1
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", label(text))
    assert len(label(text)) <= 60


@needs_pdflatex
@settings(max_examples=4)
@given(st.lists(TEXTS, min_size=40, max_size=60))
def test_pdflatex_accepts_untrusted_texts(tmp_path_factory, texts):
    rows = " \\\\\n".join(f"{latex_text(text)} & {latex_text(text, breakable=True)}" for text in texts)
    comments = "\n".join(map(comment, texts))
    compiled(tmp_path_factory.mktemp("latex"), f"{comments}\n\\begin{{tabular}}{{lp{{5cm}}}}\n{rows} \\\\\n\\end{{tabular}}")


@needs_pdflatex
def test_pdflatex_accepts_all_characters(tmp_path):
    """Each character up to those of Chinese, and a sample of the rest."""
    signs = [*map(chr, range(0x3100)), *map(chr, range(0x3100, sys.maxunicode, 997))]
    compiled(tmp_path, "\n\n".join(" ".join(map(latex_text, signs[first : first + 40])) for first in range(0, len(signs), 40)))
