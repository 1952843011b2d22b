"""Mutation test: seeded mistakes in tested modules, before and after a change of tests.

Usage: ``python tests/mutants.py BEFORE [AFTER] [--seed N] [--count 20]`` (commits; AFTER is the working tree's HEAD by default).
Each mutant is one changed operator, constant or condition of a module in `TESTED`, which a further module needs a line in. It is killed
if one of the module's test files fails. Prints a table; exit code 1 if a mutant killed BEFORE survives AFTER.
"""

import argparse
import ast
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTED = {
    "launch/kubernetes_manifest.py": ["tests/unit/test_kubernetes_manifest.py"],
    "launch/driver/task_group.py": ["tests/unit/test_task_group.py"],
    "launch/node/supervisor.py": ["tests/unit/test_supervisor.py", "tests/unit/test_fork_server.py"],
    "monitor/network.py": ["tests/unit/test_monitor_network.py"],
    "report/compare/ratios.py": ["tests/unit/test_ratios.py"],
    "report/analysis/fit.py": ["tests/unit/test_predict.py"],
    "report/runs/series.py": ["tests/unit/test_curves.py", "tests/unit/test_series.py"],
}
"""Modules, each with the test files that have changed."""

OPPOSITES = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is"}
OPPOSITES |= {ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


def mutations(source):
    """Every changed expression on one line: (line, first column, last column, old, new)."""
    mutations_of_module = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITES:
            new = f"({ast.unparse(node.left)}) {OPPOSITES[type(node.ops[0])]} ({ast.unparse(node.comparators[0])})"
        elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITES:
            new = f"(({ast.unparse(node.left)}) {OPPOSITES[type(node.op)]} ({ast.unparse(node.right)}))"
        elif isinstance(node, ast.BoolOp):
            new = f" {'or' if isinstance(node.op, ast.And) else 'and'} ".join(f"({ast.unparse(value)})" for value in node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new = f"bool({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            new = f"({node.value!r} + 1)"
        else:
            continue
        if node.lineno == node.end_lineno:
            old = source.splitlines()[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            mutations_of_module.append((node.lineno, node.col_offset, node.end_col_offset, old, new))
    return mutations_of_module


def mutated(source, mutation):
    line, first, last, _, new = mutation
    lines = source.splitlines(keepends=True)
    raw = lines[line - 1].encode()
    lines[line - 1] = (raw[:first] + f"({new})".encode() + raw[last:]).decode()
    return "".join(lines)


def drawn(tree, seed, count):
    """Draw mutants, spread evenly over the modules: (module, mutation)."""
    rng, modules = random.Random(seed), sorted(TESTED)
    pools = {module: rng.sample(all_of, len(all_of)) for module in modules for all_of in [mutations((tree / module).read_text())]}
    return [(module, pools[module].pop()) for number in range(count) if pools[module := modules[number % len(modules)]]]


def killed(module, mutation, seed, tree):
    """Whether a test of the module fails, or cannot be collected, with the mutation.

    The tree at `tree` is restored afterwards.
    """
    path = tree / module
    source = path.read_text()
    tests = [test for test in TESTED[module] if (tree / test).exists()] or sys.exit(f"{tree}: there is none of {TESTED[module]}")
    link = tree / ".dev/crosstrain"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("..")
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # failures of a mutant are no examples for the next
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed", str(seed)]
    command += ["-m", "not slow and not clusters", *tests]
    try:
        path.write_text(mutated(source, mutation) if mutation else source)
        done = subprocess.run(command, cwd=tree, env=environment(tree, seed), capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)
    if done.returncode not in (0, 1, 2, 4):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def verdict(module, seed, mutation, tree):
    """Whether the mutant is killed in the tree; None where the tree has no such expression."""
    return None if mutation is None else killed(module, mutation, seed, tree)


def environment(tree, seed):
    """Import packages from `tree`, as the installed ones are the working tree's.

    Random cases are drawn from `seed`.
    """
    return {**os.environ, "PYTHONPATH": str(tree / ".dev"), "PYTHONDONTWRITEBYTECODE": "1", "CROSSTRAIN_TEST_SEED": str(seed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folders are removed
    escaped = 0
    with ExitStack() as stack:
        trees = [stack.enter_context(checked_out(commit)) for commit in (options.before, options.after)]
        side_by_side = stack.enter_context(ThreadPoolExecutor(2))
        for module in TESTED:
            for tree, failed in zip(trees, side_by_side.map(partial(killed, module, None, options.seed), trees), strict=True):
                if failed:
                    sys.exit(f"{tree}: the tests of {module} fail without a mistake")
        print("| module | line | was | mutant | before | after |\n|---|---|---|---|---|---|")
        for module, mutation in drawn(trees[1], options.seed, options.count):
            mutated = [counterpart(tree, module, mutation) for tree in trees]
            verdicts = list(side_by_side.map(partial(verdict, module, options.seed), mutated, trees))
            escaped += verdicts == [True, False]
            words = " | ".join({True: "killed", False: "survives", None: "not there"}[verdict_of_tree] for verdict_of_tree in verdicts)
            print(f"| {module} | {mutation[0]} | `{mutation[3]}` | `{mutation[4]}` | {words} |".replace("||", "\\|\\|"), flush=True)
    return escaped > 0


def counterpart(tree, module, mutation):
    """The same expression's mutation in another tree with other lines, or None."""
    same = [candidate for candidate in mutations((tree / module).read_text()) if candidate[3:] == mutation[3:]]
    return min(same, key=lambda candidate: abs(candidate[0] - mutation[0]), default=None)


@contextmanager
def checked_out(commit):
    """A commit in a folder of its own."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="crosstrain-mutants-") as folder:
        tree = Path(folder, "tree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    sys.exit(main())
