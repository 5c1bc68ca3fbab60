"""Dockerfiles: read into stages, and replayed without a Docker daemon.

`read` does what a builder's parser does for the instructions we use. `Replay` runs COPY, ENV and RUN of every stage in a
folder that stands for the image's root, then starts what the image would. It cannot show what the base image holds:
package managers of the system and commands that create users are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SKIPPED = ("apt-get", "groupadd", "useradd")  # of the base image's system
_OWN_PATHS = re.compile(r"(?<![\w./-])/(?=(opt|src|cache)\b)")  # of the image, which the replay puts into its folder
_USER: dict[str, Any] = {"user": 10001, "group": 10001, "extra_groups": []}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True)
class Instruction:
    word: str  # upper case
    flags: dict[str, str]  # --from=build
    text: str  # what follows them
    line: int

    @property
    def is_exec_form(self) -> bool:
        return self.text.startswith("[")

    def command(self) -> list[str]:
        """Of the exec form; HEALTHCHECK's is after CMD."""
        words = json.loads(self.text.removeprefix("CMD").strip())
        assert isinstance(words, list) and all(isinstance(word, str) for word in words)
        return words


@dataclass
class Stage:
    base: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[Instruction]:
        return [each for each in self.instructions if each.word == word]

    def last(self, word: str) -> Instruction:
        return self.all(word)[-1]


def read(path: Path) -> list[Stage]:
    """Raises `ValueError` for what is not a Dockerfile."""
    stages: list[Stage] = []
    for number, line in _logical_lines(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        flags = {}
        while found := re.match(r"--([a-z-]+)=(\S+)\s+", rest := rest.strip()):
            flags[found[1]], rest = found[2], rest[found.end() :]
        if word.upper() == "FROM":
            words = rest.split()
            stages.append(Stage(words[0], words[2] if len(words) == 3 else None))
        elif not stages:
            raise ValueError(f"{path.name}:{number}: {word} before FROM")
        else:
            stages[-1].instructions.append(Instruction(word.upper(), flags, rest, number))
    if not stages:
        raise ValueError(f"{path.name} has no FROM")
    return stages


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Without comments and with continued lines joined; the number is that of the first line."""
    lines: list[tuple[int, str]] = []
    open_line: tuple[int, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (open_line is None and not line.strip()):
            continue
        first, before = open_line or (number, "")
        joined = before + line.strip()
        if joined.endswith("\\"):
            open_line = (first, joined[:-1])
        else:
            lines.append((first, joined))
            open_line = None
    return lines


class Replay:
    """One image, built into `folder`/root. `arguments` are those of `docker build --build-arg`."""

    def __init__(self, folder: Path, context: Path, *, arguments: Mapping[str, str]) -> None:
        self.root = folder / "root"
        self._folder, self._context, self._arguments = folder, context, arguments
        self._log = folder / "build.log"
        self._bin = folder / "bin"
        self._bin.mkdir()
        shims = dict.fromkeys(_SKIPPED, "exit 0")
        self._python = os.environ.get("REPLAY_PYTHON") or os.path.realpath(sys.executable)
        shims |= dict.fromkeys(("python", "python3"), f'exec {self._python} "$@"')
        if os.geteuid() != 0:  # owners cannot be set: make the folder alone
            shims["install"] = 'for last; do :; done; mkdir -p "$last"'
        for name, script in shims.items():
            (self._bin / name).write_text(f"#!/bin/sh\n{script}\n")
            (self._bin / name).chmod(0o755)

    @property
    def has_user(self) -> bool:
        """Whether this process may become the image's user, to whom the image but for /cache is read-only."""
        if os.geteuid() != 0:
            return False
        try:
            return subprocess.run([self._python, "-c", ""], check=False, **_USER).returncode == 0
        except PermissionError:  # the interpreter is in a folder of this user
            return False

    def build(self, stages: list[Stage]) -> Stage:
        """The last stage, whose `environment` and commands a container would get."""
        for number, stage in enumerate(stages):
            self.root.mkdir(parents=True)
            self._build(stage)
            if number + 1 < len(stages):
                self.root.rename(self._folder / f"stage-{stage.name}")
        return stages[-1]

    def _build(self, stage: Stage) -> None:
        self.environment = {"PATH": f"{self._bin}:/usr/sbin:/usr/bin:/sbin:/bin"}
        arguments: dict[str, str] = {}
        directory = self.root
        for each in stage.instructions:
            if each.word == "ARG":
                name, _, default = each.text.partition("=")
                arguments[name] = self._arguments.get(name, default)
            elif each.word == "ENV":
                for pair in shlex.split(each.text):
                    name, _, value = pair.partition("=")
                    self.environment[name] = self._inside(_expand(value, self.environment | arguments))
            elif each.word == "WORKDIR":
                directory = Path(self._inside(each.text))
                directory.mkdir(parents=True, exist_ok=True)
            elif each.word == "COPY":
                self._copy(each, directory)
            elif each.word == "RUN":
                self._run(self._inside(each.text), directory, arguments)

    def _inside(self, text: str) -> str:
        return _OWN_PATHS.sub(lambda _: f"{self.root}/", text)

    def _copy(self, each: Instruction, directory: Path) -> None:
        *sources, target = each.text.split()
        before = self._folder / f"stage-{each.flags['from']}" if "from" in each.flags else self._context
        for source in sources:
            start = before / source.lstrip("/")
            end = Path(self._inside(target)) if target.startswith("/") else directory / target
            if start.is_dir():
                copy = _link if "from" in each.flags else shutil.copy
                shutil.copytree(start, end, symlinks=True, dirs_exist_ok=True, copy_function=copy)
            else:
                shutil.copy(start, end)

    def _run(self, command: str, directory: Path, arguments: Mapping[str, str]) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        with self._log.open("a") as log:
            log.write(f"+ {command}\n")
            log.flush()
            ended = subprocess.run(["/bin/sh", "-ec", command], cwd=directory, stdout=log, stderr=subprocess.STDOUT,
                                   env={**pip, "HOME": str(self._folder), **arguments, **self.environment},
                                   check=False, timeout=900)  # fmt: skip
        assert ended.returncode == 0, f"RUN {command} failed:\n{self._log.read_text()[-4000:]}"

    def start(self, command: list[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """As a container would: the image's variables and no others, and its user, where `has_user`."""
        user = _USER if self.has_user else {}
        environment = self.environment | variables
        program = shutil.which(command[0], path=environment["PATH"])
        assert program is not None, f"{command[0]} is not in the image"
        with output.open("ab") as log:
            return subprocess.Popen([program, *command[1:]], cwd=self.environment["HOME"], env=environment, stdout=log,
                                    stderr=subprocess.STDOUT, **user)  # fmt: skip


def _expand(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def _link(source: str, target: str) -> str:
    """As good as a copy for files that are only read, and quick."""
    Path(target).hardlink_to(source)
    return target
