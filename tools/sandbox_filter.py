"""Which system calls a sandboxed program may make: a seccomp filter as classic BPF.

What is not listed does not exist for the program (``ENOSYS``, for which C libraries have a
fallback), or is forbidden (``EPERM``) where a program should read that: no sockets but pairs of
streams, no child processes, no signals to others, no changed owners, modes or times of files.
Threads are allowed. ``exec`` of another program is allowed: it inherits the filter.
"""

import errno
import struct
import sys

from graphpo_agent.errors import ToolError

__all__ = ["system_call_filter"]

# name:number on x86_64:number on aarch64, "-" where the machine has no such call.
_ALLOWED = {
    "files": """
        read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- lseek:8:62
        pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70
        preadv2:327:286 pwritev2:328:287 access:21:- dup:32:23 dup2:33:- dup3:292:24
        pipe:22:- pipe2:293:59 sendfile:40:71 copy_file_range:326:285 flock:73:32
        fsync:74:82 fdatasync:75:83 ftruncate:77:46 fallocate:285:47 fadvise64:221:223
        readahead:187:213 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49
        fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34
        rmdir:84:- creat:85:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35
        symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78 umask:95:166
        statfs:137:43 fstatfs:138:44 openat:257:56 openat2:437:437 newfstatat:262:79
        faccessat:269:48 faccessat2:439:439 statx:332:291 close_range:436:436
    """,
    "memory": """
        mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227
        mincore:27:232 madvise:28:233
    """,
    "time and waiting": """
        poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:-
        epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22
        eventfd:284:- eventfd2:290:19 pause:34:- nanosleep:35:101 getitimer:36:102
        setitimer:38:103 alarm:37:- gettimeofday:96:169 time:201:- times:100:153
        clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
        timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
        timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85
        timerfd_settime:286:86 timerfd_gettime:287:87
    """,
    "the process and its threads": """
        execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 futex:202:98
        futex_waitv:449:449 set_robust_list:273:99 set_tid_address:218:96 rseq:334:293
        membarrier:324:283 restart_syscall:219:128 sched_yield:24:124
        sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
        sched_get_priority_max:146:125 sched_get_priority_min:147:126 rt_sigaction:13:134
        rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
        rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 getrlimit:97:163
        setrlimit:160:164 getrusage:98:165 getpriority:140:141 setsid:112:157
        setpgid:109:154 arch_prctl:158:-
    """,
    "who and where am I": """
        getpid:39:172 getppid:110:173 gettid:186:178 getpgrp:111:- getpgid:121:155
        getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
        getgroups:115:158 getresuid:118:148 getresgid:120:150 uname:63:160 sysinfo:99:179
        getcpu:309:168 getrandom:318:278
    """,
    "pairs of sockets inside the process": """
        sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
        shutdown:48:210 getsockname:51:204 getpeername:52:205 setsockopt:54:208
        getsockopt:55:209
    """,
}
_FORBIDDEN = """
    socket:41:198 fork:57:- vfork:58:- kill:62:129 tkill:200:130 tgkill:234:131 ptrace:101:117
"""
# (call, argument, values): allowed with one of these values only.
_ALLOWED_WITH = (
    ("fcntl:72:25", 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),  # duplicates, flags, locks; no signals
    ("ioctl:16:29", 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # isatty, FIONREAD, …
    ("prctl:157:167", 0, (15, 16)),  # PR_SET_NAME, PR_GET_NAME
    ("prlimit64:302:261", 0, (0,)),  # the caller's own limits
    # Connected for good: a pair of datagram sockets could send to any other socket by its name.
    ("socketpair:53:199", 1, tuple(k | f for k in (1, 5) for f in (0, 0x800, 0x80000, 0x80800))),
)
_CLONE = "clone:56:220"
_CLONE_THREAD = 0x10000

_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column of the tables above, and the kernel's AUDIT_ARCH number."""

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16


def system_call_filter(machine: str) -> bytes:
    """The filter as an array of ``struct sock_filter``, for ``PR_SET_SECCOMP``.

    Example: ``len(system_call_filter("x86_64")) // 8`` instructions, some 350.

    Args:
        machine: as ``platform.machine()`` says it.

    Raises:
        ToolError: no table for this kind of machine, or another system than Linux.
    """
    if machine not in _MACHINES or sys.platform != "linux":
        raise ToolError(
            "sandbox: isolation needs Linux on x86_64 or aarch64, found "
            f"{sys.platform} on {machine}; 'isolation: none' runs programs unprotected"
        )
    column, audit_number = _MACHINES[machine]
    code = [_do(_LOAD, _MACHINE_AT), _do(_EQUAL, audit_number, 1, 0), _do(_RETURN, _KILL)]
    code.append(_do(_LOAD, _NUMBER_AT))
    for group in _ALLOWED.values():
        for number in _numbers(group, column):
            code += _on_call(number, [_do(_RETURN, _ALLOW)])
    for number in _numbers(_FORBIDDEN, column):
        code += _on_call(number, [_do(_RETURN, _ERROR | errno.EPERM)])
    for call, argument, values in _ALLOWED_WITH:
        [number] = _numbers(call, column)
        code += _on_call(number, _only_values(argument, values))
    [number] = _numbers(_CLONE, column)
    code += _on_call(number, _only_threads())
    code.append(_do(_RETURN, _ERROR | errno.ENOSYS))
    return b"".join(code)


def _numbers(calls: str, column: int) -> list[int]:
    found = [call.split(":")[column] for call in calls.split()]
    return [int(number) for number in found if number != "-"]


def _do(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; jumps count the instructions to leave out."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _on_call(number: int, then: list[bytes]) -> list[bytes]:
    """``then``, which returns, on one system call; go on behind it on any other."""
    return [_do(_EQUAL, number, 0, len(then)), *then]


def _only_values(argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow some values of an argument's low 32 bits."""
    code = [_do(_LOAD, _ARGUMENTS_AT + 8 * argument)]
    for value in values:
        code += _on_call(value, [_do(_RETURN, _ALLOW)])
    return [*code, _do(_RETURN, _ERROR | errno.EPERM)]


def _only_threads() -> list[bytes]:
    return [
        _do(_LOAD, _ARGUMENTS_AT),
        _do(_ANY_BIT, _CLONE_THREAD, 0, 1),
        _do(_RETURN, _ALLOW),
        _do(_RETURN, _ERROR | errno.EPERM),
    ]
