"""Text from small Debian packages, from a folder and by apt from a local archive."""

import gzip
import hashlib
import importlib.metadata
import json
import shutil
import struct
import subprocess
import time
import tomllib

import pytest
from click.testing import CliRunner
from debian_archive import LocalArchive

from crosstrain.cli.commands.data import data
from crosstrain.core.errors import MissingPackageError, UsageError
from crosstrain.core.plugins import SEPARATE
from crosstrain.core.settings.sources import ResumedRun, resolve
from crosstrain.data.sources.translation.tokenizer import Vocabulary
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain_debian_text import packages as archive
from crosstrain_debian_text import source
from crosstrain_debian_text.documents import Block, blocks, cleaned_message, paired, read_mo, read_po, wrong_with
from crosstrain_debian_text.packages import Extraction

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None, reason="needs apt")

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ZAHLEN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


def words(number, names):
    return " ".join(names[int(digit)] for digit in f"{number:03d}")


MESSAGES = [
    (f"_Open the file of number {words(number, NUMBERS)}", f"Die Datei Nummer {words(number, ZAHLEN)} _öffnen") for number in range(300)
]


def mo(messages, order="<"):
    """Return a catalogue in the format of GNU gettext's manual."""
    rows = sorted((key.encode(), value.encode()) for key, value in [("", "Content-Type: text/plain; charset=UTF-8\n"), *messages])
    place = 28 + 16 * len(rows)
    tables, data = [b"", b""], b""
    for row in rows:
        for side, text in enumerate(row):
            tables[side] += struct.pack(f"{order}2I", len(text), place + len(data))
            data += text + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    return head + tables[0] + tables[1] + data


def deb(folder, name, files, version="1.0"):
    root = folder / f"{name}-root"
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: A Test <a@b.invalid>\nDescription: made for a test\n"
    (root / "DEBIAN" / "control").write_text(control)
    path = folder / f"{name}_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-b", root, path], check=True, capture_output=True)
    shutil.rmtree(root)
    return path, control


def page(texts):
    return "<html><head><title>no</title></head><body>" + "".join(f"<p>{text}</p>" for text in texts) + "</body></html>"


ENGLISH = ["The <b>first</b> paragraph of a page, with a tag.", "The second one is short.", "Untranslated text here"]
GERMAN = ["Der <b>erste</b> Absatz einer Seite, mit einem Element.", "Der zweite ist kurz.", "Untranslated text here"]


def packages(folder):
    folder.mkdir(exist_ok=True)
    copyright = "Format: x\n\nFiles: *\nLicense: GPL-2+\n text\n\nFiles: a\nLicense: CC-BY-SA-4.0\n"
    return [
        deb(folder, "gimp-data", {
            "usr/share/locale/de/LC_MESSAGES/gimp.mo": mo(MESSAGES),
            "usr/share/locale/fr/LC_MESSAGES/gimp.mo": mo([("Another language here", "Une autre langue")]),
            "usr/share/doc/gimp-data/copyright": copyright,
        }),
        deb(folder, "debian-faq", {"usr/share/doc/debian-faq/one.en.html": page(ENGLISH)}),
        deb(folder, "debian-faq-de", {"usr/share/doc/debian-faq-de/one.de.html.gz": gzip.compress(page(GERMAN).encode())}),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def texts(dataset, split, name):
    known, column = Vocabulary(dataset.attachment("vocabulary.model")), dataset.column(split, name)
    return [known.decode(column.example(number)) for number in range(len(column))]


def expect_whole(dataset):
    train, test = (list(zip(*(texts(dataset, split, name) for name in ("source", "target")), strict=True)) for split in ("train", "test"))
    assert len(train) + len(test) == len(MESSAGES) + 2
    assert ("Open the file of number one two three", "Die Datei Nummer eins zwei drei öffnen") in {*train, *test}
    assert ("The first paragraph of a page, with a tag.", "Der erste Absatz einer Seite, mit einem Element.") in {*train, *test}
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in test}
    record = json.loads(dataset.attachment("packages.json"))
    assert [package["name"] for package in record["packages"]] == ["debian-faq-de", "debian-faq", "gimp-data"]
    assert record["packages"][2]["licences"] == ["GPL-2+", "CC-BY-SA-4.0"]
    assert record["pairs"] == {"train": len(train), "test": len(test), "unique": 302}
    assert record["left_out"] == {"not translated": 1}
    return record


@pytest.mark.parametrize(
    "ask",
    [
        lambda: resolve({"data": "debian-text:en-de?vocabulary=400"}, {}),
        lambda: resolve({}, {}, "debian-text-tiny"),
        lambda: resolve({}, {}, resumed=ResumedRun({"data": "debian-text"}, "old", 5, None, lambda fields: None)),
        lambda: open_dataset("debian-text"),
    ],
    ids=["an option", "a configuration", "an old run", "its data"],
)
def test_missing_package_error_names_installation(tmp_path, monkeypatch, ask):
    monkeypatch.syspath_prepend(tmp_path)  # installed packages are cached by search path
    monkeypatch.setattr(importlib.metadata, "entry_points", importlib.metadata.EntryPoints)
    with pytest.raises(MissingPackageError, match=r"^data: 'debian-text' has a package .* pip install \./examples/debian_text, in a clone"):
        ask()


def test_named_package_has_the_dataset(repository):
    for name, install in SEPARATE["dataset"].items():
        folder = install.removeprefix("pip install ").partition(",")[0]
        project = tomllib.loads((repository / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert name in project["entry-points"]["crosstrain.datasets"]


@needs_dpkg
def test_packages_in_a_folder_become_a_dataset(tmp_path, capsys):
    made = packages(tmp_path / "debs")
    record = expect_whole(open_dataset("debian-text:en-de?vocabulary=400", tmp_path / "debs"))
    assert record["packages"][2]["sha256"] == hashlib.sha256(made[0][0].read_bytes()).hexdigest()
    errors = capsys.readouterr().err
    assert "reading gimp-data 1.0 (GPL-2+, CC-BY-SA-4.0)" in errors
    assert record["pairs_sha256"] in errors


@needs_apt
def test_apt_fetches_packages_from_archive(tmp_path, monkeypatch, capsys):
    local_archive = LocalArchive(tmp_path, monkeypatch)
    local_archive.publish(packages(local_archive.folder))
    record = expect_whole(open_dataset("debian-text:en-de?vocabulary=400"))
    assert "inkscape" in record["not_in_the_archive"]
    assert "skipped, as they are not in this archive: abiword-common" in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob(".*.work"))


def test_missing_apt_error_names_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"made from packages of a Debian archive by 'apt-get', which this machine has not.*--data-dir"):
        open_dataset("debian-text:en-de")


@needs_apt
def test_archive_without_the_packages_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"apt knows none of the packages.*apt-get update"):
        archive.fetch(["no-such-package-at-all"], tmp_path)


@needs_dpkg
def test_damaged_package_is_named(tmp_path):
    (path, _), *_ = packages(tmp_path / "debs")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"gimp-data_1\.0_all\.deb' is (damaged|no package)"):
        Extraction([path]).pairs()
    (tmp_path / "text.deb").write_text("none")
    with pytest.raises(UsageError, match="is no package of Debian"):
        Extraction([tmp_path / "text.deb"]).pairs()


@pytest.mark.parametrize("name", ["debian-text:de-en", "debian-text:en-de?words=3", "debian-text:en-de?vocabulary=9", "debian-text:"])
def test_other_arguments_are_refused(name):
    with pytest.raises(UsageError):
        open_dataset(name)


def test_invalid_size_is_quoted_as_typed():
    for size in ("abc", "-1", "9" * 5000, "٤٠٠٠"):
        with pytest.raises(UsageError, match=f"vocabulary of 'debian-text': got '{size}'"):
            open_dataset(f"debian-text:en-de?vocabulary={size}")


@needs_dpkg
def test_info_shows_text_digest(tmp_path):
    packages(tmp_path / "debs")
    named = ["info", "debian-text:en-de?vocabulary=400", "--data-dir", str(tmp_path / "debs")]
    facts = json.loads(CliRunner().invoke(data, [*named, "--json"], catch_exceptions=False).stdout)
    dataset = open_dataset(named[1], tmp_path / "debs")
    assert facts["text_sha256"] == json.loads(dataset.attachment("packages.json"))["pairs_sha256"]
    assert f"text sha256                   {facts['text_sha256']}\n" in CliRunner().invoke(data, named, catch_exceptions=False).stdout
    assert (dataset.path / "packages.json").is_file()
    assert facts["path"] == str(dataset.path)


def test_name_without_defaults_is_equivalent():
    assert source.DATASET.with_arguments("en-de?vocabulary=8000").name == "debian-text"
    assert source.DATASET.with_arguments("en-de").with_vocabulary(4000).name == "debian-text:en-de?vocabulary=4000"


@pytest.mark.parametrize("order", ["<", ">"])
def test_compiled_catalogues_are_read_in_either_byte_order(order):
    messages = [("One file", "Eine Datei"), ("ctx\x04Open it", "Öffnen"), ("%d file\0%d files", "%d Datei\0%d Dateien"), ("empty", "")]
    expected = {("One file", "Eine Datei"), ("Open it", "Öffnen"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")}
    assert set(read_mo(mo(messages, order))) == expected


@pytest.mark.parametrize("seed", range(8))
def test_damaged_catalogue_is_refused_or_read(seed):
    content = bytearray(mo(MESSAGES[:5]))
    for place in range(4 + seed, len(content), 9):
        content[place] = 255 - content[place]
    with pytest.raises(ValueError, match=r"catalogue|message|codec"):
        list(read_mo(bytes(content)))
    with pytest.raises(ValueError, match="no catalogue"):
        list(read_mo(bytes(content[: 3 + seed])))


def test_text_catalogues_skip_fuzzy_and_obsolete_messages():
    text = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

#: a.c:3
msgctxt "menu"
msgid "Open "
"it"
msgstr "Es "
"öffnen \\"jetzt\\""

#, fuzzy
msgid "Unsure"
msgstr "Unsicher"

msgid "a file"
msgid_plural "files"
msgstr[0] "eine Datei"
msgstr[1] "Dateien"

#~ msgid "Old"
#~ msgstr "Alt"
msgid "Next"
msgstr "Nächstes"
"""
    expected = [("Open it", 'Es öffnen "jetzt"'), ("a file", "eine Datei"), ("files", "Dateien"), ("Next", "Nächstes")]
    assert list(read_po(text)) == expected


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("_File", "File"), ("&Save As", "Save As"), ("~Help me", "Help me"),
        ("Save &amp; Close", "Save & Close"), ("snake_case", "snake_case"),
        ("a <b>bold</b>, word ( <i>x</i> ).", "a bold, word (x)."), ("two\n lines ", "two lines"), ("?plural:Danes", "Danes"),
        ("female^Elvish Archer", "Elvish Archer"), ("1 < 2", "1 < 2"), ("word</p><p>word", "word word"),
    ],
)  # fmt: skip
def test_cleaning(text, clean):
    assert cleaned_message(text, text) == (clean, clean)


@pytest.mark.parametrize(
    ("source", "target", "clean"),
    [
        ("E_xit now", "Jetzt B_eenden", ("Exit now", "Jetzt Beenden")), ("E&xit now", "Jetzt &beenden", ("Exit now", "Jetzt beenden")),
        ("P~references", "_Einstellungen", ("Preferences", "Einstellungen")),
        ("The apt_preferences file", "Die Datei apt_preferences", ("The apt_preferences file", "Die Datei apt_preferences")),
        ("The dir_name option", "Die Option", ("The dir_name option", "Die Option")),
        ("Use dir_name and file_name", "Nutze ver_name und datei_name", ("Use dir_name and file_name", "Nutze ver_name und datei_name")),
        ("The a_b_c name", "Der d_e_f Name", ("The a_b_c name", "Der d_e_f Name")),
        ("The R&D budget", "Das F&E-Budget", ("The R&D budget", "Das F&E-Budget")),
        ("_Save the R&amp;D budget", "Das F&amp;E-Budget _speichern", ("Save the R&D budget", "Das F&E-Budget speichern")),
        ("Press &Next or &Back", "Dr&uuml;cken Sie &Weiter", ("Press Next or Back", "Drücken Sie Weiter")),
    ],
)  # fmt: skip
def test_mark_within_word_is_mnemonic_if_possible(source, target, clean):
    assert cleaned_message(source, target) == clean
    assert cleaned_message(target, source) == clean[::-1]


@needs_dpkg
def test_manual_paragraphs_have_no_mnemonics_or_tags(tmp_path):
    english = ["The R&amp;D budget of a firm.", "Read apt_preferences for it.", "The &lt;pre&gt; element is wide.", "It is <b>bold</b> ."]
    german = ["Das F&amp;E-Budget der Firma.", "Lesen Sie apt_preferences.", "Das Element &lt;pre&gt; ist breit.", "Das ist <b>fett</b> ."]
    made = [
        deb(tmp_path, "debian-faq", {"usr/share/doc/debian-faq/one.en.html": page(english)}),
        deb(tmp_path, "debian-faq-de", {"usr/share/doc/debian-faq-de/one.de.html": page(german)}),
    ]
    extraction = Extraction([path for path, _ in made])
    assert extraction.pairs() == [("The R&D budget of a firm.", "Das F&E-Budget der Firma."), ("It is bold.", "Das ist fett.")]
    assert extraction.left_out == {"code or placeholders": 2}


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("Open the file", "Datei öffnen", None), ("50 % of the files", "50 % der Dateien", None), ("Open", "Öffnen", "a single word"),
        ("Open %1 now", "%1 jetzt öffnen", "code or placeholders"), ("Open the file", "Open the file", "not translated"),
        ("Use B&ack or Ne&xt", "Nutze Z&urück", "code or placeholders"), ("The R&D budget", "Das F&E-Budget", None),
        ("Visit http://x.y", "Besuche http://x.y", "code or placeholders"), ("", "leer", "empty"), ("word " * 100, "Wort", "too long"),
        ("1234 5678 ab cd", "1234 5678 ef gh", "few letters"), ("a few words here", "Wort " * 40, "of unlike length"),
    ],
)  # fmt: skip
def test_unsuitable_pairs_are_skipped(source, target, why):
    assert wrong_with(source, target) == why


def test_pages_are_paired_by_markup_or_by_identifiers():
    english = blocks(
        '<h1 id="t">Title</h1><ul><li>First <!-- <li>no</li> --> item</li></ul><pre>code <p>x</p></pre><p id="b">Last &amp; least</p>'
    )
    assert [(block.tag, block.identifier, block.text) for block in english] == [
        ("h1", "t", "Title"),
        ("li", "", "First item"),
        ("p", "b", "Last & least"),
    ]
    same = blocks("<h1>Titel</h1><ul><li>Erstes</li></ul><p>Letztes</p>")
    assert list(paired(english, same)) == [("Title", "Titel"), ("First item", "Erstes"), ("Last & least", "Letztes")]
    german = blocks('<h1 id="t">Titel</h1><p>Anderes</p><p id="b">Letztes</p><p>Mehr</p>')
    assert list(paired(english, german)) == [("Title", "Titel"), ("Last & least", "Letztes")]


@pytest.mark.thorough
def test_hostile_pages_are_parsed_in_bounded_time():
    for text in ("<" * 200_000, "<!--" * 50_000, "<pre>" * 50_000, "<a " * 100_000, "<p>" + "&" * 200_000):
        assert len(blocks(text)) <= 1
    began = time.process_time()  # of this process only, which others cannot delay
    assert blocks("<p>" + "<i>" * 2_000_000 + "some text</p>") == [Block("p", "", "some text")]
    assert time.process_time() - began < 30  # two seconds; over two minutes if each tag copies the text before it
