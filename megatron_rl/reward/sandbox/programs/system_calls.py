"""The system calls that programs in a sandbox do not have: a filter of the kernel (seccomp).

They would undo what other walls rely on:
- a process that other processes may change: ptrace, process_vm_*, pidfd_getfd
- memory that no limit counts: shmget, semget, msgget, memfd_*, io_uring_setup
- rights in a namespace of its own, where it is root: unshare, setns, clone with a new namespace
- a life longer than the parent's: prctl(PR_SET_PDEATHSIG)
The filter holds for all descendants, and cannot be taken away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from megatron_rl.reward.sandbox.programs.kernel import LIBC, SET_PARENT_DEATH_SIGNAL, checked

NAMES = (
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "shmget", "semget", "msgget",
    "memfd_create", "memfd_secret", "io_uring_setup", "unshare", "setns", "mount", "add_key",
    "request_key", "keyctl", "bpf", "userfaultfd", "perf_event_open",
)  # fmt: skip
"""Calls that fail with EPERM."""
OTHERS = ("clone3", "clone", "prctl")
"""clone3 fails with ENOSYS, so that libc calls clone; clone and prctl depend on an argument."""
NUMBERS = {
    "x86_64": (
        101, 310, 311, 438, 29, 64, 68, 319, 447, 425, 272, 308, 165, 248, 249, 250, 321, 323, 298,
        435, 56, 157,
    ),
    "aarch64": (
        117, 270, 271, 438, 194, 190, 186, 279, 447, 425, 97, 268, 40, 217, 218, 219, 280, 282, 241,
        435, 220, 167,
    ),
}  # fmt: skip
"""Machine -> the numbers of NAMES and OTHERS."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEW_NAMESPACE = 0x7E020000
"""Flags of clone that make a namespace: mounts, cgroups, names, IPC, users, processes, network."""
OTHER_ABI = 0x40000000
"""Bit of the numbers of x86's x32 calls."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; of the argument its low half."""
SET_SECCOMP, FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""(code, instructions to skip if true, if false, operand) of the kernel's BPF."""


def deny_system_calls() -> None:
    """Take the calls away from this process and all that it starts.  After
    kernel.forbid_new_privileges.  Raises OSError where the kernel or the machine has no filter.
    """
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise OSError(f"seccomp on {machine}: the numbers of its system calls are not known")
    program = filter_for(machine)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    checked(LIBC.prctl(SET_SECCOMP, FILTER, ctypes.c_char_p(header), 0, 0), "seccomp")


def filter_for(machine: str) -> list[Instruction]:
    """Return the filter's instructions."""
    numbers = dict(zip((*NAMES, *OTHERS), NUMBERS[machine], strict=True))
    denied: Instruction = (RETURN, 0, 0, FAIL | errno.EPERM)
    allowed: Instruction = (RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[machine]), denied,
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, OTHER_ABI), denied,
    ]  # fmt: skip
    for name in NAMES:
        program += [(EQUAL, 0, 1, numbers[name]), denied]
    program += [(EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    conditions = (("clone", ANY_BIT, NEW_NAMESPACE), ("prctl", EQUAL, SET_PARENT_DEATH_SIGNAL))
    for name, test, operand in conditions:
        program += [
            (EQUAL, 0, 4, numbers[name]), (LOAD, 0, 0, FIRST_ARGUMENT), (test, 0, 1, operand),
            denied, allowed,
        ]  # fmt: skip
    return [*program, allowed]
