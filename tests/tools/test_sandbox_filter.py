import re
import struct
import sys
from pathlib import Path

import pytest

from graphpo_agent.errors import ToolError
from tools import sandbox_filter
from tools.sandbox_filter import system_call_filter

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {  # on 64 bits; aarch64 has the numbers that new machines have
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
# read, socket, kill, clone, fcntl, prctl, prlimit64, chmod or fchmodat
CALLS = {
    "x86_64": (0, 41, 62, 56, 72, 157, 302, 90),
    "aarch64": (63, 198, 129, 220, 25, 167, 261, 53),
}


def decide(machine, number, arguments=(0, 0), audit=None):
    """What the kernel would do: a classic BPF machine of the four instructions that are used."""
    data = struct.pack("=iIQ6Q", number, audit or MACHINES[machine], 0, *arguments, 0, 0, 0, 0)
    code = list(struct.iter_unpack("=HBBI", system_call_filter(machine)))
    at, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:
            [loaded] = struct.unpack_from("=I", data, value)
        elif operation == 0x15:
            at += if_true if loaded == value else if_false
        elif operation == 0x45:
            at += if_true if loaded & value else if_false
        else:
            assert operation == 0x06
            return value


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_allowed_forbidden_or_unknown(machine):
    read, socket, kill, clone, fcntl, prctl, prlimit, chmod = CALLS[machine]
    assert decide(machine, read) == ALLOW
    assert decide(machine, socket) == decide(machine, kill) == EPERM
    assert decide(machine, chmod) == ENOSYS
    assert decide(machine, clone, (0x11, 0)) == EPERM
    assert decide(machine, clone, (0x7D0F00, 0)) == ALLOW
    assert decide(machine, fcntl, (9, 3)) == ALLOW and decide(machine, fcntl, (9, 8)) == EPERM
    assert decide(machine, prctl, (15, 0)) == ALLOW and decide(machine, prctl, (1, 0)) == EPERM
    assert decide(machine, prlimit, (0, 7)) == ALLOW and decide(machine, prlimit, (1, 7)) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_gets_an_answer_and_most_get_none(machine):
    answers = [decide(machine, number) for number in range(600)]
    assert set(answers) == {ALLOW, EPERM, ENOSYS}
    assert answers[450:] == [ENOSYS] * 150
    assert decide(machine, 0x40000000) == ENOSYS  # x32's numbering


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine):
    header = HEADERS[machine]
    if not header.is_file():
        pytest.skip("needs the kernel's headers, as of linux-libc-dev")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text())
    theirs = dict(reversed(defined))
    if "fstatat" in theirs:
        theirs["newfstatat"] = theirs["fstatat"]
    listed = re.findall(r"(\w+):(\d+|-):(\d+|-)", Path(sandbox_filter.__file__).read_text())
    ours = {name: numbers[list(MACHINES).index(machine)] for name, *numbers in listed}
    assert len(ours) > 150
    assert ours == {name: theirs.get(name, "-") for name in ours}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_calls_of_another_machine_end_the_program(machine):
    assert decide(machine, 0, audit=0x40000003) == KILL  # i386


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("darwin", "x86_64")])
def test_an_unknown_machine_or_system_is_refused(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    expected = f"needs Linux on x86_64 or aarch64, found {system} on {machine};"
    with pytest.raises(ToolError, match=expected):
        system_call_filter(machine)
