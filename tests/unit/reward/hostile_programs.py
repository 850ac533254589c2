"""Programs that try to get out of a sandbox, each with what it must not reach.

A program prints what it got; `HIDDEN` are the texts that must not be in it.  {name} is replaced by
a value of the test: `secret_file`, `port`, `socket_name`, `marker`.
"""

READS = """
import glob, os, sys
def show(path):
    try:
        print(path, open(path, "rb").read()[:2000])
    except OSError as error:
        pass
for path in ["{secret_file}", "/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ",
             "/proc/1/cmdline", "/proc/1/root{secret_file}", "/sys/kernel/notes", "/dev/mem",
             "/dev/kmsg", "../../../..{secret_file}", "/box/../{secret_file}"]:
    show(path)
for root, _, files in os.walk("/"):
    for name in files:
        if "secret" in name:
            show(os.path.join(root, name))
print("environment", dict(os.environ))
print("folders", sorted(os.listdir("/")))
print("end")
"""

LINKS = """
import os
targets = ["{secret_file}", "/etc/passwd", "/proc/1/root", "/", "..", "/root"]
for number, target in enumerate(targets):
    for make in (os.symlink, os.link):
        name = f"link{{number}}"
        try:
            make(target, name)
            print(open(name if os.path.isfile(name) else name + "{secret_file}", "rb").read())
        except OSError:
            pass
        try:
            os.remove(name)
        except OSError:
            pass
print("end")
"""

WRITES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def write_all():
    for folder in ["/", "/usr/lib", "/python", "/python/bin", "/python/lib", "/programs", "/dev",
                   "/etc", "/lib", "/root", "/home", "/var/tmp", "/run"]:
        try:
            with open(folder + "/escaped", "w") as file:
                file.write("x")
            print("ESCAPED", folder)
        except OSError:
            pass
        try:
            os.makedirs(folder + "/escaped.d")
            print("ESCAPED", folder)
        except OSError:
            pass
write_all()
for flags in (32, 32 | 4096, 4096, 16384 | 4096):  # REMOUNT, BIND, REC
    for path in (b"/", b"/usr/lib", b"/programs", b"/python/lib"):
        if libc.mount(path, path, b"tmpfs", flags, None) == 0:
            print("ESCAPED mount", path, flags)
        libc.umount2(path, 2)
write_all()
try:
    os.mknod("/box/disk", 0o600 | 0o060000, os.makedev(254, 0))
    open("/box/disk", "rb").read(1)
    print("ESCAPED device")
except OSError:
    pass
for change in (lambda: os.setuid(0), lambda: os.seteuid(0), lambda: os.chroot("/box"),
               lambda: os.sethostname(b"x")):
    try:
        change()
        print("ESCAPED privilege")
    except (OSError, AttributeError):
        pass
print("end")
"""

NESTED = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
uid = os.getuid()
print("unshare", libc.unshare(0x10000000 | 0x00020000))  # a user and a mount namespace of its own
for path in (b"/", b"/usr/lib", b"/programs"):
    libc.mount(None, path, None, 32 | 4096, None)
    libc.umount2(path, 2)
    try:
        open(path.decode() + "/escaped", "w")
        print("ESCAPED", path)
    except OSError:
        pass
for path in ("{secret_file}", "/etc/passwd"):
    try:
        print(open(path).read())
    except OSError:
        pass
count = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
print("forks", count, "end", flush=True)
"""

NETWORK = """
import socket
places = [(name, {port}) for name in ("127.0.0.1", "0.0.0.0", "{own_address}")]
places += [("192.0.2.1", 80), ("8.8.8.8", 53)]
addresses = [(socket.AF_INET, place) for place in places]
addresses += [(socket.AF_INET6, ("::1", {port})), (socket.AF_UNIX, "\\0{socket_name}")]
for family, address in addresses:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as connection:
                connection.settimeout(0.3)
                connection.connect(address)
                connection.send(b"escaped")
                if kind == socket.SOCK_STREAM:
                    print("ESCAPED", address)
        except OSError:
            pass
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    print("ESCAPED raw socket")
except OSError:
    pass
try:
    print("ESCAPED", socket.getaddrinfo("example.com", 80))
except OSError:
    pass
print("end")
"""

FORK_BOMB = """
# {marker}
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

FORKS = """
# {marker}
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
print(count, flush=True)
"""

THREADS = """
import threading, time
count = 0
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count, flush=True)
import os
os._exit(0)
"""

MEMORY_BOMB = """
blocks = []
try:
    while True:
        blocks.append(bytearray(2**24))
except MemoryError:
    count = len(blocks)
    del blocks
    print(count * 16)
"""

FULL_BOX = """
import os
total = 0
try:
    for number in range(10**6):
        with open(f"file{{number}}", "wb") as file:
            for _ in range(64):
                total += file.write(b"x" * 2**14)
except OSError as error:
    print(total // 2**20, error.errno)
"""

LOOP = "# {marker}\nwhile True: pass"
SLEEP = "# {marker}\nimport time\nprint('asleep', flush=True)\ntime.sleep(3600)"
DEAF = """
# {marker}
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    time.sleep(1)
"""
CLOSED = "# {marker}\nimport os, time\nfor n in range(3): os.close(n)\ntime.sleep(3600)"
TALKATIVE = "# {marker}\nimport sys\nwhile True: sys.stdout.write('x' * 65536)"

DAEMON = """
# {marker}
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(64):
            try:
                os.close(number)
            except OSError:
                pass
        time.sleep(3600)
    os._exit(0)
os.wait()
print("left", flush=True)
"""

LOUD_DAEMON = """
# {marker}
import os, time
if os.fork() == 0:
    time.sleep(3600)  # holds the output open
print("left", flush=True)
os._exit(0)
"""

KILLS = """
import os, signal
for target in (os.getppid(), 0, 1, -1, {caller}, -{caller}):
    if target not in (0, -1):
        try:
            os.kill(target, signal.SIGKILL)
        except OSError:
            pass
print("end", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(0, signal.SIGKILL)
"""

KILLS_ALL = "import os\nos.kill(-1, 9)\nprint('end')"

OUTLIVES = """
# {marker}
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)  # no signal when the parent dies
libc.unshare(0x10000000)  # new rights forget that signal, too
libc.ptrace(16, 1, 0, 0)  # process 1
libc.ptrace(16, os.getppid(), 0, 0)
os.setsid() if os.getpid() != os.getsid(0) else None
print("asleep", flush=True)
time.sleep(3600)
"""

SYSTEM_CALLS = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
calls = dict(
    prctl=lambda: libc.prctl(1, 0, 0, 0, 0),
    ptrace=lambda: libc.ptrace(0, 0, 0, 0),  # by the parent
    shmget=lambda: libc.shmget(0, 4096, 0o600),
    semget=lambda: libc.semget(0, 1, 0o600),
    msgget=lambda: libc.msgget(0, 0o600),
    memfd=lambda: libc.memfd_create(b"x", 0),
    unshare=lambda: libc.unshare(0x10000000),
    clone=lambda: libc.syscall(SYS_clone, 0x10000000 | 17, None, None, None, None),
    read_other=lambda: libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0),
    steal=lambda: libc.syscall(438, os.pidfd_open(os.getpid()), 0, 0),
)
SYS_clone = dict(x86_64=56, aarch64=220)[os.uname().machine]
made = []
for name, call in calls.items():
    ctypes.set_errno(0)
    if call() >= 0 or ctypes.get_errno() != 1:
        made.append(name)
print(json.dumps(made))
"""
