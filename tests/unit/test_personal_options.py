"""Personal options: by flag, variable or a private file, never by shared files."""

import json
import os
from pathlib import Path

import pytest

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.core.settings.personal import PERSONAL_OPTIONS, personal_file, resolve_personal, shown_command
from crosstrain.core.settings.sources import resolve
from crosstrain.launch.driver.resumption import refuse_personal

URL = "https://me:pass@hooks.example:8443/services/T0/SECRET?key=SECRET"
VALUES = {
    "hosts": "a,b",
    "hostfile": "/tmp/hosts",
    "python": "/opt/python",
    "ray_address": "head:6379",
    "notify": URL,
    "on_failure": "mail me",
}
HIDDEN = ("pass", "SECRET", "me:")


@pytest.fixture
def home(tmp_path):
    """An environment whose personal file is written by calling it with a text."""
    folder = tmp_path / "config" / "crosstrain"
    folder.mkdir(parents=True, mode=0o700)

    class Home(dict):
        path = folder / "trainer.toml"

        def write(self, text):
            self.path.write_text(text)
            self.path.chmod(0o600)
            return self

    return Home({"XDG_CONFIG_HOME": str(folder.parent)})


def resolved_options(environ, **flags):
    return {name: (option.value, option.source) for name, option in resolve_personal(PERSONAL_OPTIONS, flags, environ).items()}


def refused(environ, **flags):
    with pytest.raises(UsageError) as raised:
        resolve_personal(PERSONAL_OPTIONS, flags, environ)
    assert raised.value.exit_code == 2
    return str(raised.value)


def test_flag_overrides_variable_and_personal_file(home):
    home.write('python = "/file"\nnotify = "http://file"\non_failure = "file"\n')
    home.update(TRAINER_NOTIFY="http://variable", TRAINER_ON_FAILURE="variable", TRAINER_HOSTS="")
    assert resolved_options(home, on_failure="flag", python=None) == {
        "python": ("/file", f"file {home.path}"),
        "notify": ("http://variable", "environment TRAINER_NOTIFY"),
        "on_failure": ("flag", "flag"),
    }
    assert resolved_options({"XDG_CONFIG_HOME": "/no/such/folder"}) == {}


def test_hosts_and_hostfile_replace_each_other(home):
    home.write('hostfile = "~/hosts"\n')
    assert resolved_options(home) == {"hostfile": (str(Path("~/hosts").expanduser()), f"file {home.path}")}
    assert resolved_options(home, hosts="a") == {"hosts": ("a", "flag")}
    assert resolved_options({**home, "TRAINER_HOSTS": "b"}, hostfile="/x") == {"hostfile": ("/x", "flag")}


def test_personal_file_is_in_the_configuration_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert personal_file({}) == personal_file({"XDG_CONFIG_HOME": "relative"}) == Path("/home/me/.config/crosstrain/trainer.toml")
    assert personal_file({"XDG_CONFIG_HOME": "/etc/me"}) == Path("/etc/me/crosstrain/trainer.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lr = 0.1\n",
            "lr (in {}): your own file of options has hosts, hostfile, python, ray_address, notify, on_failure and nothing else",
        ),
        ('notifi = "http://x"\n', "Did you mean 'notify'?"),
        ("hosts = 3\n", "hosts (in {}): got int; allowed: a text in quotes."),
        ('hosts = ["a", "b"]\n', "hosts (in {}): got list; allowed: a text in quotes."),
        ('[notify]\nurl = "http://x"\n', "notify (in {}): got dict; allowed"),
        ('on_failure = ""\n', "on_failure (in {}): got an empty text"),
        ('hostfile = "hosts"\n', "hostfile (from file {}): got 'hosts'; allowed: a whole path"),
        ("hosts = \n", "{} is not valid TOML"),
        ('hosts = "a"\nhosts = "b"\n', "{} is not valid TOML"),
        ("x = " + "[" * 100_000, "{} is not valid TOML"),
        ("# " + "x" * (1 << 18) + "\n", "{}: is larger than 256 KiB"),
        ("x" + ".x" * 20_000 + " = 1\n", "{} has a line with more than 10,000 dots"),
        ('notify = "ftp://host/x"\n', "notify (from file {}): has another scheme than http and https"),
        ('hosts = "a"\nhostfile = "/b"\n', None),
    ],
)
def test_error_in_the_personal_file_names_it(home, text, message):
    home.write(text)
    if message is None:
        assert resolved_options(home).keys() == {"hosts", "hostfile"}  # both on one layer: their user reports it
    else:
        assert message.format(home.path) in refused(home)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_personal_file_writable_by_others_is_refused(home, mode):
    home.write('on_failure = "x"\n').path.chmod(mode)
    assert f"{home.path}: can be written by others (mode {mode:o})" in refused(home)


def test_personal_file_in_writable_folder_is_refused(home):
    home.write('on_failure = "x"\n').path.parent.chmod(0o777)
    assert f"{home.path.parent}: can be written by others (mode 777)" in refused(home)
    home.path.parent.chmod(0o1777)  # as /tmp: others cannot replace files of this user
    assert resolved_options(home)["on_failure"][0] == "x"
    elsewhere = home.path.parents[2] / "open"
    elsewhere.mkdir()
    home.path.parent.chmod(0o700)
    home.path.rename(elsewhere / "mine.toml")
    home.path.symlink_to(elsewhere / "mine.toml")
    assert resolved_options(home)["on_failure"][0] == "x"
    elsewhere.chmod(0o777)
    assert f"{elsewhere}: can be written by others" in refused(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_personal_file_of_another_user_is_refused(home):
    os.chown(home.write('on_failure = "x"\n').path, 12345, -1)
    assert f"{home.path}: belongs to another user (number 12345)" in refused(home)


def test_personal_path_that_is_no_file_is_refused(home):
    os.mkfifo(home.path)
    assert f"{home.path}: is no file" in refused(home)
    home.path.unlink()
    home.path.mkdir()
    assert str(home.path) in refused(home)


@pytest.mark.parametrize(
    "url", ["ftp://h/x", "file:///x", "h/x", "", "http://", "https://:80/", "http://h:port/", "http://[::1", "http://h/ä", "http://h/\n"]
)
def test_invalid_address_is_refused_and_not_shown(url):
    if url:
        message = refused({"TRAINER_NOTIFY": url})
        assert message.startswith("notify (from environment TRAINER_NOTIFY): ")
        assert "an http:// or https:// URL" in message
    assert refused({}, notify=url).startswith("--notify: ")


def test_refused_address_is_not_shown():
    for url in ("ftp://me:PASSWORD@h/x", "http://me:PASSWORD@:80", "http://h:PASSWORD", "http://h/" + "PASSWORD" * 300):
        assert "PASSWORD" not in refused({}, notify=url)


def test_empty_value_is_refused():
    assert refused({}, on_failure="") == "--on-failure: got an empty text; leave it out, or give a value."


def test_records_hold_no_secret_of_address_or_command():
    typed = ["trainer", "run", "--notify", URL, f"--notify={URL}", "--on-failure", f"curl {URL}", f"--on-failure=curl {URL}", "--seed", "3"]
    kept = shown_command(typed)
    assert kept == [
        *("trainer", "run", "--notify", "https://hooks.example:8443/...", "--notify=https://hooks.example:8443/..."),
        *("--on-failure", "...", "--on-failure=...", "--seed", "3"),
    ]


@pytest.mark.parametrize("name", PERSONAL_OPTIONS)
def test_settings_file_accepts_no_personal_option(tmp_path, name):
    path = tmp_path / "job.toml"
    path.write_text(f"{name} = '{VALUES[name]}'\n")
    with pytest.raises(UsageError) as raised:
        resolve({}, {}, path)
    assert str(raised.value).startswith(f"{name} (in file {path}): is never taken from a file of settings")
    assert PERSONAL_OPTIONS[name].variable in str(raised.value)
    assert not any(part in str(raised.value) for part in HIDDEN)


@pytest.mark.parametrize("name", PERSONAL_OPTIONS)
def test_personal_option_in_run_files_is_refused(tmp_path, name):
    with pytest.raises(UsageError) as raised:
        refuse_personal({"lr": 0.1, name: VALUES[name]}, tmp_path / "job.json")
    assert f"has {name}, which the files of a run never decide" in str(raised.value)
    assert not any(part in str(raised.value) for part in HIDDEN)


def test_print_config_shows_sources_without_secrets(home, monkeypatch, capsys):
    for name, value in home.write(f'notify = "{URL}"\npython = "/opt/python"\n').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINER_ON_FAILURE", "mail me")
    assert invoke(["run", "--backend", "torch", "--hosts", "a,b", "--print-config", "--json"]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert {name: (shown[name]["value"], shown[name]["source"]) for name in PERSONAL_OPTIONS} == {
        "hosts": ("a,b", "flag"),
        "hostfile": (None, "default"),
        "python": ("/opt/python", f"file {home.path}"),
        "ray_address": (None, "default"),
        "notify": ("https://hooks.example:8443/...", f"file {home.path}"),
        "on_failure": ("mail me", "environment TRAINER_ON_FAILURE"),
    }
    assert shown["nodes"]["value"] == 2
    assert not any(part in out for part in HIDDEN)


def nodes_of(capsys, *arguments):
    code = invoke(["run", "--backend", "torch", *arguments, "--print-config", "--json"])
    captured = capsys.readouterr()
    return json.loads(captured.out)["nodes"]["value"] if code == 0 else captured.err


def test_hosts_of_personal_file_are_the_last_resort(home, monkeypatch, capsys):
    for name, value in home.write('hosts = "a,b,c"\n').items():
        monkeypatch.setenv(name, value)
    assert nodes_of(capsys) == 3
    assert nodes_of(capsys, "--hosts", "d,e") == 2
    assert nodes_of(capsys, "--launcher", "local", "--nodes", "5") == 5
    assert f"nodes: got 5, but hosts (from file {home.path}) says 3; leave it out" in nodes_of(capsys, "--nodes", "5")
    assert invoke(["sweep", "quickstart", "--backend", "torch", "--grid", "lr=0.1,0.2", "--dry-run"]) == 2
    assert f"hosts (from file {home.path}) names hosts for them; give --launcher local" in capsys.readouterr().err
    assert invoke(["sweep", "quickstart", "--backend", "torch", "--grid", "lr=0.1,0.2", "--dry-run", "--launcher", "local"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("TRAINER_HOSTS", "d,e")
    assert invoke(["sweep", "quickstart", "--backend", "torch", "--grid", "lr=0.1,0.2", "--dry-run"]) == 2
    assert "names hosts for them; unset TRAINER_HOSTS, or give --launcher local" in capsys.readouterr().err
    assert invoke(["sweep", "quickstart", "--backend", "torch", "--grid", "lr=0.1,0.2", "--dry-run", "--launcher", "local"]) == 0
    assert "TRAINER_HOSTS: the sweep has its nodes elsewhere, and nothing uses it" in capsys.readouterr().err
    assert nodes_of(capsys) == 2
    assert nodes_of(capsys, "--launcher", "local", "--nodes", "5") == 5
    monkeypatch.delenv("TRAINER_HOSTS")
    monkeypatch.setenv("TRAINER_SECRET", "x" * 32)
    assert nodes_of(capsys, "--rendezvous", "127.0.0.1:29400", "--node-rank", "0", "--nodes", "4") == 4


@pytest.mark.parametrize("variable", ["TRAINER_HOSTS", "TRAINER_HOSTFILE"])
def test_launcher_flag_overrides_hosts_of_a_variable(monkeypatch, capsys, variable):
    """As in a Slurm job, to which sbatch passes the variables of the submitting shell."""
    monkeypatch.setenv(variable, "/no/such,file")
    assert invoke(["run", "--backend", "torch", "--launcher", "slurm"]) == 2
    output = capsys.readouterr().err
    assert f"{variable}: --launcher slurm has its nodes elsewhere, and nothing uses it" in output
    assert "'slurm' starts the nodes of a Slurm job; type it inside of one" in output
    assert invoke(["run", "--backend", "torch", "--launcher", "slurm", "--hosts", "a,b"]) == 2
    assert "'slurm' starts the nodes where Slurm has allocated them; leave --hosts and --hostfile out" in capsys.readouterr().err
    assert invoke(["doctor", "--launcher", "slurm"]) == 2
    assert "'slurm' starts the nodes of a Slurm job; type it inside of one" in capsys.readouterr().err


def test_hosts_variable_conflicts_with_existing_nodes(monkeypatch, capsys):
    monkeypatch.setenv("TRAINER_HOSTS", "a,b")
    arguments = ["run", "--backend", "torch", "--nodes", "2", "--rendezvous", "127.0.0.1:29400", "--node-rank", "0"]
    assert invoke(arguments) == 2
    message = "hosts (from environment TRAINER_HOSTS): starts the nodes, but --rendezvous has started them already; unset TRAINER_HOSTS"
    assert message in capsys.readouterr().err
