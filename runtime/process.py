"""How a command starts, stops and ends: signals, exit codes, the watchdog, and the replicas of a host."""
import faulthandler
import math
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

from runtime.errors import TransientError, UserError
from runtime.files import duration, to_stderr

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # SLURM sends SIGUSR1
STOP = threading.Event()  # set once this process is asked to save and stop; one rank's request stops all
START_TIMEOUT = 1800  # seconds in which torch_xla must have started a replica
STOP_TIMEOUT = 60  # seconds in which a replica must have stopped; the system kills it then


def command(main):
    """Runs main(sys.argv[1:]) as a command: an expected error becomes one line on stderr and an exit code."""
    open_stderr()
    name = os.path.basename(sys.argv[0])
    with suppress(AttributeError):  # it is closed, or a test's
        sys.stdout.reconfigure(errors="backslashreplace")  # for a path that the terminal's encoding lacks
    # a run of sweep.py ends with it; the commands that this one starts do not see its id
    sweep = os.environ.pop("TRM_SWEEP", "")
    if sweep:
        end_with_parent(int(sweep))

    with ended_by_signals():
        try:
            main(sys.argv[1:])
            print(end="", flush=True)
        except BrokenPipeError:
            # The reader of the output has left, as `| head` does: Python must not flush the rest.
            sys.stdout = None
            sys.exit(1)
        except (UserError, TransientError) as e:
            print(f"{name}: {' '.join(str(e).splitlines())}", file=sys.stderr)
            sys.exit(2 if isinstance(e, UserError) else 1)
        except KeyboardInterrupt:
            print(f"{name}: stopped", file=sys.stderr)
            sys.exit(3)


@contextmanager
def ended_by_signals():
    """Lets a signal end its block as Ctrl-C does, by a KeyboardInterrupt: what it was writing is removed."""
    has_ended = threading.Event()

    # a second signal must not interrupt that
    def interrupt(number, frame):
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    # Python drops a KeyboardInterrupt that is raised in __del__: the process then ends after four seconds
    def end(number):
        if number in STOP_SIGNALS and not has_ended.wait(4):
            os._exit(3)

    restore = take_signals(interrupt, end)
    try:
        yield
    finally:
        has_ended.set()
        restore()


def open_stderr():
    """Opens /dev/null as stderr where that is closed, as by `2>&-`: the next file would take its number."""
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)


def take_signals(handler, act):
    """Lets this process handle STOP_SIGNALS, and returns a function that puts back what handled them.

    handler: Python calls handler(number, frame) on the main thread once that has finished an operation, which
    can take minutes. act: a thread calls act(number) at once.
    """
    # Python can handle no signals on another thread
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    # the system's handler writes a byte at once, on whatever thread it runs
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier_fd = signal.set_wakeup_fd(writer)

    def read():
        while number := os.read(reader, 1):
            act(number[0])
        os.close(reader)

    start_thread(read)
    earlier = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's & and nohup let it be ignored
            earlier[number] = signal.signal(number, handler)

    def restore():
        signal.set_wakeup_fd(earlier_fd)
        os.close(writer)
        # None: a handler of a C library, which Python cannot put back
        for number, earlier_handler in earlier.items():
            signal.signal(number, earlier_handler or signal.SIG_DFL)

    return restore


def start_thread(call):
    """Calls call() in a thread, which does not keep this process from ending."""
    threading.Thread(target=call, daemon=True).start()


def end_with_parent(parent=0):
    """Ends this process once its parent is gone: a rank would wait for its peers forever.

    parent: its id, if it may be gone by now.
    """
    starter = multiprocessing.parent_process()
    parent = parent or (starter.pid if starter else os.getppid())

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    start_thread(watch)


# ---------------------------------------------------------------------------------------------------------
# Requests to stop a run. On TPUs each replica is a process, to which the main process passes them on.

class StepDropped(Exception):
    """A request to stop has dropped a step that takes long."""


@contextmanager
def contained():
    """Lets a signal request a stop in its block. Afterwards the process is as before, for notebooks."""
    environment = dict(os.environ)
    restore = on_signals()
    try:
        yield
    finally:
        STOP.clear()
        restore()
        restart_watchdog(0)
        os.environ.clear()
        os.environ.update(environment)


def on_signals(is_spawned=False):
    """Lets STOP_SIGNALS request a stop; all later ones are ignored, but a second SIGINT kills.

    One SIGTERM may come twice: from SLURM, and passed on by sweep.py. Returns what take_signals() returns.
    """
    if threading.current_thread() is not threading.main_thread():  # as of a sweep agent
        to_stderr("not in the main thread: a signal ends this run without a checkpoint")
    seen = set()

    def act(number):
        if number == signal.SIGINT and number in seen:
            os.kill(os.getpid(), signal.SIGKILL)  # replicas end with their parent
        if not seen and is_spawned:
            signal.alarm(STOP_TIMEOUT)  # if a replica died, the pool of processes stops its peers, which wait
        elif not seen:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"saving and stopping; a second Ctrl-C kills\n")
        seen.add(number)
        STOP.set()

    # instead of command(), which would end the process 4 seconds after a signal: a save may take longer;
    # signals without a handler do not reach act
    restore = take_signals(lambda number, frame: None, act)
    if is_spawned:
        # Ctrl-C reaches the main process too, which passes it on
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what came before
    return restore


class Watchdog:
    """Ends a process without progress. A thread counts seconds: a timer goes on while a job is suspended."""

    lock = threading.Lock()  # replicas may be threads
    thread = None
    num_seconds = 0

    def restart(self, seconds, suspended=24 * 3600):
        """Prints all stacks and ends this process with 1 after the given seconds, unless it is called again.

        0 calls it off. suspended: the most seconds of a suspension that do not count.
        """
        self.seconds = seconds
        self.limit = self.num_seconds + (seconds or math.inf)
        with self.lock:
            # a process that was forked has not inherited the thread
            if not (self.thread and self.thread.is_alive()):
                self.thread = threading.Thread(target=self.count, daemon=True)
                self.thread.start()
        # C code that keeps Python's lock stops the count, but not this timer, which is a C thread
        faulthandler.cancel_dump_traceback_later()
        if seconds:
            faulthandler.dump_traceback_later(seconds + suspended, exit=True, file=sys.__stderr__)

    def count(self):
        while self.num_seconds <= self.limit:
            time.sleep(1)
            self.num_seconds += 1
        to_stderr(f"Timeout ({duration(self.seconds)})!")
        faulthandler.dump_traceback(sys.__stderr__)
        os._exit(1)


restart_watchdog = Watchdog().restart


@contextmanager
def watching_replicas():
    """Passes a request to stop on to all replicas of this host, and stops all once one has died.

    Its peers would wait for it. Python's pool of processes can miss the last process that it starts.
    """
    has_ended = threading.Event()

    def watch():
        replicas = set()
        stopped = set()
        has_died = False
        while not (has_died or has_ended.wait(0.1)):
            # active_children() would leave out one that died before it was listed
            replicas.update(multiprocessing.process._children)
            has_died = any(replica.exitcode for replica in replicas)  # None: it runs, 0: it is done
            # once each: a replica that has stopped and ends would be killed
            if has_died or STOP.is_set():
                for replica in replicas - stopped:
                    replica.terminate()
                stopped.update(replicas)

    start_thread(watch)
    # A replica inherits this thread's blocked signals until it handles them in on_signals: before, SIGTERM
    # would kill it. Multiprocessing would start its tracker first, which unblocks them.
    multiprocessing.resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        has_ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
