"""What all scripts share: how they speak, read a command line, write a file and end. No torch: it loads at once."""

import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

NOBODY_READS = (errno.EPIPE, errno.EINVAL, errno.EIO)  # Windows says EINVAL, a terminal that is gone EIO


class UserError(Exception):
    """Ends a script with one line. status: 1 for a failure, 2 for wrong usage or wrong input."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def say(text, stream="stdout"):
    """Print text to a stream of sys, clear of a bar. If nobody reads it any more, the work goes on."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        tqdm.write(text, file=getattr(sys, stream))
        getattr(sys, stream).flush()


def notice(text):
    """Print text to stderr, as `say` does: what is no result."""
    say(text, "stderr")


def progress(items=None, **options):
    """items with a bar on stderr while they are taken, on a terminal only. options: tqdm's."""
    return tqdm(items, ascii=True, disable=None, dynamic_ncols=True, **options)


def parse(parser, argv=None):
    """The arguments of a command line; a wrong one ends the program with status 2 and one line, as argparse does."""
    args, extra = parser.parse_known_args(argv)
    if extra:
        dash = next((char for char in extra[0] if char in "‐‑‒–—―−－"), None)  # as an editor or a web page puts it
        hint = f"; it begins with {dash} (U+{ord(dash):04X}), a flag begins with -" if dash else ""
        parser.error(f"unrecognized: {' '.join(extra)}{hint}")
    return args


def temporary_name(path):
    return path.with_name(f".{path.name}.tmp")


def check_writable(path):
    """Raise UserError, status 2, unless `write_file` can write path: asked before long work."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "ab"):
            pass
        temporary.unlink()
        if path.exists() and not path.is_file():
            raise OSError("it is a folder or a device")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; it needs {temporary} too", 2) from None


def write_file(path, data):
    """Write data (bytes) by way of a temporary file: path always holds the old file or the new one, whole."""
    path = Path(path)
    temporary = temporary_name(path)  # one that a killed run left is written over
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for patience in (0.1, 0.2, 0.4, 0.8, 0):  # seconds, for a virus scanner that holds the file
            try:
                os.replace(temporary, path)
                break
            except PermissionError:
                if not patience:
                    raise
                time.sleep(patience)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # there only when something went wrong


def out_of_memory(error):
    """Whether error says so; torch has no exception of its own for it on a CPU."""
    said = isinstance(error, RuntimeError) and re.search("out of memory|(allocate|enough) memory", str(error))
    return bool(said) or isinstance(error, MemoryError)


def leave(stream):
    """Write what stream still holds; if that fails, let Python end without another word about it."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def caught_signals():
    """Give a function that tells whether Ctrl-C, SIGTERM or SIGHUP has come; a second one ends the run at once."""
    caught = []

    def note(number, frame):
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, such as a tee that the same Ctrl-C ended
            os.write(sys.stderr.fileno(), b"\nfinishing this step, then saving; press Ctrl-C again to leave at once\n")

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP, nohup has it ignored, a thread has none
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quoted(words, windows=os.name == "nt"):
    """The line that calls Python with these words, quoted for the system's shell."""
    return (subprocess.list2cmdline if windows else shlex.join)(["python", *words])


def run(main):
    """Call main and return the exit status: 0, 1 or 2 with one line on stderr, 130 for Ctrl-C.

    Any other exception is a fault of the program, or of an edited constant, and is raised.
    """
    for name in ("stdout", "stderr"):  # UTF-8 on every terminal; a closed one gets nothing
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        what = str(error)
        if out_of_memory(error):
            what = "out of memory; choose smaller sizes, or less at once"
        elif isinstance(error, RuntimeError):
            raise
        elif isinstance(error, OSError) and error.strerror:
            if not error.filename and error.errno in NOBODY_READS:  # the reader, such as `head -1`, has enough
                return 0
            what = f"{error.filename or 'the output'}: {error.strerror}"
        notice(f"{Path(sys.argv[0]).name}: {what}")
        return getattr(error, "status", 1)
    finally:
        leave(sys.stdout)
        leave(sys.stderr)
