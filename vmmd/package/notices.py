#!/usr/bin/env python3
"""Prints the licence notices of everything that is linked into the programs of the package: each crate with its licence, each licence text
once, and the Rust standard library. With `--of FOLDER` it prints those of the program of another crate, whose sources are there. With `--check` it
checks every crate of Cargo.lock against deny.toml instead: its licence is allowed, it is not banned, and it comes from crates.io."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TARGET = "x86_64-unknown-linux-gnu"
PROGRAMS = ("vmmd", "vmmd-network", "vmm-core", "vmm-image", "vmmctl", "vmmd-kube")
# Files with the text of a licence or a notice, at the top of a crate.
TEXTS = re.compile(r"^(licen[cs]e|copying|notice|copyright|unlicense)", re.IGNORECASE)
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def metadata(folder: str = ".") -> list[dict]:
    cargo = os.environ.get("CARGO", "cargo")
    return json.loads(output(cargo, "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET,
                             "--manifest-path", f"{folder}/Cargo.toml"))["packages"]


def linked(programs: tuple[str, ...], folder: str) -> set[tuple[str, str]]:
    """Names and versions of the crates that the programs link. Procedural macros run in the compiler only."""
    cargo = os.environ.get("CARGO", "cargo")
    crates = set()
    for program in programs:
        tree = output(cargo, "tree", "--locked", "--manifest-path", f"{folder}/Cargo.toml", "--package", program, "--edges", "normal,no-proc-macro",
                      "--target", TARGET, "--prefix", "none", "--format", "{p}")
        for line in tree.splitlines():
            name, version = line.split()[:2]
            crates.add((name, version.removeprefix("v")))
    return crates


def texts(folder: Path) -> list[str]:
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and TEXTS.match(path.name)]
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in found]


def standard_library() -> tuple[str, list[str]]:
    root = Path(output(os.environ.get("RUSTC", "rustc"), "--print", "sysroot").strip())
    folder = root / "share/doc/rust"
    # COPYRIGHT-library.html names the authors and licences of what the library itself is made of, with its dependencies.
    found = [re.sub(r"<[^>]*>", "", path.read_text()) for path in folder.glob("COPYRIGHT-library.html")]
    if not found:
        found = ["Copyright (c) The Rust Project Contributors. Its texts are those of the licences MIT and Apache-2.0 in this file."]
    return "Rust standard library (MIT OR Apache-2.0)", found


def notices(programs: tuple[str, ...], folder: str) -> None:
    wanted = linked(programs, folder)
    users: dict[str, list[str]] = {}
    for package in sorted(metadata(folder), key=lambda package: (package["name"], package["version"])):
        # Those of this workspace are in the papers of the package itself.
        ours = folder == "." and package["source"] is None
        if (package["name"], package["version"]) not in wanted or ours:
            continue
        title = f"{package['name']} {package['version']} ({package['license'] or package['license_file']})"
        found = texts(Path(package["manifest_path"]).parent)
        if not found:
            authors = ", ".join(package["authors"]) or "its authors"
            found = [f"No licence text comes with the crate. It is by {authors}; see {package['repository']}."]
        for text in found:
            users.setdefault(text, []).append(title)
    title, found = standard_library()
    for text in found:
        users.setdefault(text, []).append(title)
    names = "programs of the package hold" if folder == "." else f"program {programs[0]} holds"
    print(f"The {names} code of these Rust crates, under the licences that follow.")
    for text, titles in users.items():
        print("\n" + "=" * 80)
        print("\n".join(titles))
        print("-" * 80 + "\n" + text)


def allowed(expression: str, licences: set[str]) -> bool:
    """Whether an SPDX expression can be satisfied with these licences; `/` is what OR was before SPDX."""
    tokens = re.findall(r"\(|\)|[^\s()/]+|/", expression)
    words = []
    for token in tokens:
        if token in ("(", ")"):
            words.append(token)
        elif token in ("AND", "OR", "/"):
            words.append({"AND": "and", "OR": "or", "/": "or"}[token])
        elif token == "WITH" or (words and words[-1].endswith(" WITH")):
            words[-1] = f"{words[-1]} {token}"
        else:
            words.append(token)
    known = [word if word in ("(", ")", "and", "or") else str(word in licences) for word in words]
    return bool(known) and eval(" ".join(known))  # Only parentheses, and, or, True and False.


def check() -> int:
    rules = tomllib.loads(Path("deny.toml").read_text())
    licences = set(rules["licenses"]["allow"])
    banned = {ban["crate"]: ban["reason"] for ban in rules["bans"]["deny"]}
    broken = 0
    for package in metadata():
        if package["source"] is None:
            continue
        name = f"{package['name']} {package['version']}"
        problems = []
        if package["source"] != CRATES_IO:
            problems.append(f"comes from {package['source']}")
        if package["name"] in banned:
            problems.append(f"is banned: {banned[package['name']]}")
        if not allowed(package["license"] or "", licences):
            problems.append(f"has the licence {package['license']!r}, which deny.toml does not allow")
        for problem in problems:
            print(f"{name} {problem}")
            broken = 1
    return broken


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    if sys.argv[1:2] == ["--of"]:
        crate = tomllib.loads(Path(sys.argv[2], "Cargo.toml").read_text())
        notices((crate["package"]["name"],), sys.argv[2])
    else:
        notices(PROGRAMS, ".")
