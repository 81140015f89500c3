"""Starts a child (another program, or a function of this one) in a process group of its own, which
dies when its parent dies.

For the supervisor and for agents; imports next to nothing, since both stand on the start path.
What does not belong here: deciding what to start, waiting, logs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

CRASHED = 71
"""Exit code of a child of ``fork`` whose function raised."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> int:
    """Starts ``argv[0]`` (an absolute path) and returns its pid, which is also its group's.

    The child gets SIGKILL when this process ends, however it ends; what the child starts itself
    does not. It has the three descriptors and ``pass_fds`` (same numbers) and no other, default
    signal handlers and an empty signal mask. Must be called from the main thread: the death signal
    is tied to the thread that forks. Raises OSError if it cannot be run.
    """
    parent = os.getpid()
    failure_r, failure_w = _pipe_beyond_standard()
    # A signal that came to the child before it forgot our handlers would end up in our event loop.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _exec(argv, env, (stdin, stdout, stderr), pass_fds, parent, failure_w)
    except OSError:
        os.close(failure_r)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(failure_w)
    with os.fdopen(failure_r, "rb") as pipe:
        code = pipe.read()
    if code:
        os.waitpid(pid, 0)
        raise OSError(int(code), os.strerror(int(code)), argv[0])
    return pid


def fork(main: Callable[[], int], *, name: str) -> int:
    """Runs ``main`` in a child, which ends with what it returns; the child's pid, also its group's.

    As ``spawn``, but without another program: what is imported already need not be again. The
    child keeps all descriptors. ``name`` is what ``ps -o comm`` shows, at most 15 bytes.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
            _run(main, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run(main: Callable[[], int], parent: int) -> NoReturn:
    """In the child: never returns."""
    code = CRASHED
    try:
        _become_child(parent)
        code = main()
    except BaseException:  # noqa: BLE001 — the edge of a process: shown, and turned into its exit code
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
        # Threads that wait for a disk must not hold the end; what counts is written.
        os._exit(code)


def _pipe_beyond_standard() -> tuple[int, int]:
    """A pipe whose writing end is none of 0, 1 and 2, which the child replaces."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    if write_end > 2:
        return read_end, write_end
    moved = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(write_end)
    return read_end, moved


def _exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    standard: tuple[int, int, int],
    pass_fds: Sequence[int],
    parent: int,
    failure_w: int,
) -> NoReturn:
    """In the child: never returns."""
    try:
        # Python ignores these, and what is ignored stays ignored over an exec.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _become_child(parent)
        # Copies first, so that a source that is itself 0, 1 or 2 is not overwritten.
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in standard]
        for target, copy in enumerate(copies):
            os.dup2(copy, target)
        # What whoever started us left inheritable (a shell, make) must not reach it either.
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 — pathlib takes 4 ms to import
            _set_inheritable(int(name), int(name) <= 2 or int(name) in pass_fds)
        os.execve(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(failure_w, str(error.errno or errno.EIO).encode())
    except (TypeError, ValueError):  # a null byte, or something that is no text
        os.write(failure_w, str(errno.EINVAL).encode())
    finally:
        os._exit(127)


def _become_child(parent: int) -> None:
    """Dies with its parent, leads a group of its own, and takes signals as a new program does."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_inheritable(fd: int, inheritable: bool) -> None:
    try:
        os.set_inheritable(fd, inheritable)
    except OSError as error:
        # The descriptor through which the directory was read is gone by now.
        if error.errno != errno.EBADF:
            raise


def kill_group(pid: int, number: int) -> None:
    """Signals the whole group; one that is gone already is no error."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return
