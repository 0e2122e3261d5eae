"""What programs do with TCP sockets, and what they see: one line of JSON for each scenario.

    table.py server FOLDER ADDRESS PORT          table.py client FOLDER ADDRESS PORT

Both sides play the same scenarios, one connection each, and tell each other when to go on by a Unix
socket in FOLDER. What is printed must not depend on what carries the connection.
"""
import array, ctypes, errno, fcntl, hashlib, json, os, select, socket, struct, subprocess, sys, threading
import time

ROLE, FOLDER, ADDRESS, PORT = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
LIMIT = 10
RDHUP = 0x2000
NOSIGNAL = socket.MSG_NOSIGNAL
TCP = socket.IPPROTO_TCP


def make():
    """A TCP socket, or where AS says so what programs for SMC-R ask for."""
    family = socket.AF_INET6 if ":" in ADDRESS else socket.AF_INET
    kind = os.environ.get("AS")
    if kind == "IPPROTO_SMC":
        return socket.socket(family, socket.SOCK_STREAM, 256)
    if kind == "AF_SMC":
        fd = ctypes.CDLL(None).socket(43, socket.SOCK_STREAM, int(family == socket.AF_INET6))
        return socket.socket(family, socket.SOCK_STREAM, 0, fileno=fd)
    return socket.socket(family, socket.SOCK_STREAM)


def pattern(seed, length):
    return hashlib.shake_128(bytes([seed])).digest(length)


def digest(data):
    return f"{len(data)}:{hashlib.sha1(data).hexdigest()[:8]}"


class Side:
    def __init__(self, sock, control):
        self.s, self.control, self.saw = sock, control, []
        if sock:
            sock.settimeout(LIMIT)

    def tell(self, what="go"):
        self.control.sendall(what.encode() + b"\n")

    def wait(self):
        line = b""
        while not line.endswith(b"\n"):
            byte = self.control.recv(1)
            assert byte, "the other side is gone"
            line += byte
        return line[:-1].decode()

    def note(self, what):
        self.saw.append(what)

    def tried(self, name, call):
        try:
            self.note(f"{name} {call()}")
        except OSError as error:
            self.note(f"{name} {errno.errorcode.get(error.errno, error)}")

    def read(self, length):
        data = b""
        while len(data) < length:
            part = self.s.recv(length - len(data))
            if not part:
                break
            data += part
        self.note("read " + digest(data))

    def read_to_end(self):
        data = b""
        try:
            while part := self.s.recv(65536):
                data += part
            self.note("read " + digest(data) + " and the end")
        except OSError as error:
            self.note("read broke " + errno.errorcode.get(error.errno, str(error)))

    def write(self, seed, length):
        self.s.sendall(pattern(seed, length))

    def write_until_broken(self):
        try:
            for _ in range(4096):
                self.s.sendall(bytes(65536))
            self.note("nobody minded")
        except OSError as error:
            assert error.errno in (errno.EPIPE, errno.ECONNRESET), error
            self.note("write broke")

    def write_until_held_back(self):
        """Fills all that is on the way, because nobody reads."""
        self.s.settimeout(0.3)
        try:
            while True:
                self.s.sendall(bytes(65536))
        except TimeoutError:
            self.s.settimeout(LIMIT)

    def note_state(self):
        """Programs find by it in a pool which connections are of use still."""
        self.note(f"state {self.s.getsockopt(TCP, socket.TCP_INFO, 104)[0]}")

    def finish(self):
        self.s.shutdown(socket.SHUT_WR)

    def close(self):
        self.s.close()

    def reset(self):
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, array.array("i", [1, 0]).tobytes())
        self.s.close()

    def poll(self, mask, wanted, what):
        """Waits until all wanted events are there, and notes that."""
        poll, end, seen = select.poll(), time.monotonic() + LIMIT, 0
        poll.register(self.s, mask)
        while time.monotonic() < end:
            seen = dict(poll.poll(100)).get(self.s.fileno(), 0)
            if seen & wanted == wanted:
                return self.note(f"{what} seen")
        self.note(f"{what} not seen: {seen:#x}")


SCENARIOS = []


def scenario(client, server=None):
    """Adds one. A client of `prepares` makes its connection itself."""
    SCENARIOS.append((client, server))


def prepares(client):
    client.prepares = True
    return client


def half_close(first, second):
    def one(x):
        x.write(1, 300_000); x.finish(); x.read_to_end(); x.close()
    def other(x):
        x.read_to_end(); x.write(2, 700_000); x.close()
    return (one, other) if first else (other, one)


scenario(*half_close(True, False))
scenario(*half_close(False, True))
scenario(Side.close, Side.read_to_end)
scenario(Side.read_to_end, Side.close)


def both_ways(x):
    reader = threading.Thread(target=x.read_to_end)
    reader.start()
    x.write(3, 5_000_000); x.finish(); reader.join()


scenario(both_ways, both_ways)


def greet_and_reset(x):
    x.write(4, 10); x.read(10); x.wait(); x.reset()


def greet_and_see(x):
    x.write(5, 10); x.read(10); x.tell(); x.read_to_end()
    x.tried("again", lambda: x.s.recv(1))
    x.tried("write", lambda: x.s.send(b"x", NOSIGNAL))


scenario(greet_and_reset, greet_and_see)
scenario(greet_and_see, greet_and_reset)


def greet_and_reset_by_replacing(x):
    """What `dup2` puts another file in place of is closed; on the other side so by `dup3`."""
    x.write(4, 10); x.read(10); x.wait()
    x.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, array.array("i", [1, 0]).tobytes())
    with open(os.devnull) as file:
        os.dup2(file.fileno(), x.s.fileno(), inheritable=ROLE == "client")


scenario(greet_and_reset_by_replacing, greet_and_see)
scenario(greet_and_see, greet_and_reset_by_replacing)


def see_reset_by_poll(x):
    x.write(5, 10); x.read(10); x.tell()
    x.poll(select.POLLIN, select.POLLIN | select.POLLHUP, "reset")
    x.note("error " + errno.errorcode[x.s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)])
    x.note(f"then {x.s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}")
    x.note_state()


scenario(greet_and_reset, see_reset_by_poll)


def reset_when_held_back(x):
    x.write_until_held_back(); x.reset()


def see_reset_without_reading(x):
    x.poll(0, select.POLLHUP, "reset")


scenario(reset_when_held_back, see_reset_without_reading)
scenario(see_reset_without_reading, reset_when_held_back)


def read_when_held_back(x):
    """A crash is no end, also where bytes still wait for who has crashed."""
    x.write_until_held_back(); x.tell(); x.read_to_end()


def reset_when_told(x):
    x.wait(); x.reset()


scenario(read_when_held_back, reset_when_told)
scenario(reset_when_told, read_when_held_back)


def unread(x):
    x.wait(); time.sleep(0.3); x.s.recv(10); x.close()


def write_and_see(x):
    x.write(6, 100_000); x.tell(); x.read_to_end()


scenario(unread, write_and_see)


def leave(x):
    x.s.recv(100_000); x.close()


scenario(leave, Side.write_until_broken)
scenario(Side.write_until_broken, leave)


def killed_by_signal(x):
    """Without a handler SIGPIPE ends a process that writes to a connection that is gone."""
    child = os.fork()
    if child == 0:
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        x.s.setblocking(True)
        try:
            while True:
                os.write(x.s.fileno(), bytes(65536))
        except OSError as error:
            # The first write after a reset says so.
            try:
                os.write(x.s.fileno(), b"x")
            finally:
                os._exit(1)
    x.note(f"killed by {os.waitpid(child, 0)[1]}")


def read_end_and_be_killed(x):
    x.read_to_end(); killed_by_signal(x)


scenario(Side.close, read_end_and_be_killed)


def urgent_out(x):
    x.s.send(b"ab"); x.s.send(b"!", socket.MSG_OOB); x.s.send(b"cd"); x.wait()


def urgent_in(x):
    x.poll(select.POLLPRI, select.POLLPRI, "urgent")
    x.tried("first", lambda: x.s.recv(10))
    x.note(f"at mark {array.array('i', fcntl.ioctl(x.s, 0x8905, bytes(4)))[0]}")
    x.tried("urgent", lambda: x.s.recv(1, socket.MSG_OOB))
    x.read(2)
    x.s.setblocking(False)
    x.tried("no other", lambda: x.s.recv(1, socket.MSG_OOB))
    x.tell()


scenario(urgent_out, urgent_in)
scenario(urgent_in, urgent_out)


def stops_reading(x):
    x.s.shutdown(socket.SHUT_RD)
    x.tried("read", lambda: x.s.recv(1))
    x.write(7, 10); x.tell(); x.wait()
    x.tried("late", lambda: x.s.recv(10))
    x.tried("read", lambda: x.s.recv(1))


def writes_anyway(x):
    x.wait(); x.read(10); x.s.sendall(b"late"); time.sleep(0.2); x.tell(); x.read_to_end()


scenario(stops_reading, writes_anyway)


def woken(x):
    """One thread reads, another shuts the connection down."""
    reader = threading.Thread(target=x.read_to_end)
    reader.start(); time.sleep(0.2); x.s.shutdown(socket.SHUT_RDWR); reader.join(LIMIT)
    x.note(f"woken {not reader.is_alive()}")
    x.tried("write", lambda: x.s.send(b"x", NOSIGNAL))


scenario(woken, Side.read_to_end)


def hold(x):
    x.wait()


def see_end_by_poll(x):
    mask = select.POLLIN | RDHUP
    x.poll(mask, mask, "end"); x.note_state(); x.read_to_end()
    x.poll(select.POLLOUT, select.POLLOUT, "room")
    x.tell()


def finish_and_hold(x):
    x.finish(); x.wait()


scenario(finish_and_hold, see_end_by_poll)


def options(x):
    s = x.s
    for level, name, value in [(TCP, socket.TCP_NODELAY, 1), (TCP, socket.TCP_KEEPIDLE, 45),
                               (TCP, socket.TCP_USER_TIMEOUT, 9000),
                               (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                               (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
                               (socket.SOL_SOCKET, socket.SO_BROADCAST, 7),
                               (TCP, socket.TCP_KEEPCNT, 1000), (TCP, 9999, 1)]:
        x.tried(f"set {level} {name}", lambda: s.setsockopt(level, name, value))
        x.tried(f"get {level} {name}", lambda: s.getsockopt(level, name))
    for name in ["SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ERROR", "SO_ACCEPTCONN"]:
        x.note(f"{name} {s.getsockopt(socket.SOL_SOCKET, getattr(socket, name))}")
    x.note_state()
    x.tried("listen", lambda: s.listen())
    x.tried("bind", lambda: s.bind(("", 0)))
    s.setblocking(False)
    x.tried("empty", lambda: s.recv(1))
    x.tried("connect", lambda: s.connect((ADDRESS, PORT)))
    x.note(f"name {s.getsockname()[1] > 0} {s.getpeername()[1] > 0} {s.family.name}")
    x.tell(); x.wait()


scenario(options, options)


def messages(x):
    x.s.sendmsg([b"one ", b"two ", b"three"])
    x.s.sendto(b" four", ("192.0.2.1", 9) if x.s.family == socket.AF_INET else ("::9", 9))
    os.writev(x.s.fileno(), [b" five", b" six"])
    x.wait()
    with open(__file__, "rb") as file:
        x.note(f"sent {os.sendfile(x.s.fileno(), file.fileno(), 0, 1000)}")
    x.finish(); x.wait()


def take_messages(x):
    x.tried("peek", lambda: x.s.recv(3, socket.MSG_PEEK))
    x.tried("all", lambda: x.s.recv(9, socket.MSG_WAITALL))
    x.tried("from", lambda: x.s.recvfrom(4))
    x.tried("message", lambda: x.s.recvmsg(2))
    x.read(12)
    x.tell(); x.read(1000)
    x.note(f"queued {array.array('i', fcntl.ioctl(x.s, 0x541b, bytes(4)))[0]}")
    x.read_to_end(); x.tell()


scenario(messages, take_messages)


class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Message(ctypes.Structure):
    """`struct mmsghdr`: a message, and how long it was."""
    _fields_ = [("name", ctypes.c_void_p), ("name_length", ctypes.c_uint),
                ("parts", ctypes.POINTER(Part)), ("count", ctypes.c_size_t),
                ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t),
                ("flags", ctypes.c_size_t), ("length", ctypes.c_uint)]


def take_several(x):
    """What ends the second message of a call, the next call says."""
    x.poll(select.POLLIN, select.POLLIN, "first"); x.s.setblocking(True); x.tell()
    buffers = [ctypes.create_string_buffer(10) for _ in range(2)]
    parts = [Part(ctypes.addressof(it), 10) for it in buffers]
    messages = (Message * 2)(*[Message(parts=ctypes.pointer(it), count=1) for it in parts])
    count = ctypes.CDLL(None).recvmmsg(x.s.fileno(), messages, 2, 0, None)
    x.note(f"messages {count} of {messages[0].length}: {digest(buffers[0].raw)}")
    x.tried("then", lambda: x.s.recv(1))
    x.tried("again", lambda: x.s.recv(1))


def write_and_reset(x):
    x.write(12, 10); x.wait(); time.sleep(0.3); x.reset()


scenario(take_several, write_and_reset)
scenario(write_and_reset, take_several)


def times_out(x):
    x.s.setblocking(True)
    x.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, array.array("l", [0, 200_000]).tobytes())
    x.tried("read", lambda: x.s.recv(1)); x.tell()


scenario(times_out, hold)
scenario(hold, times_out)


@prepares
def before_connecting(x):
    """What is set before stays."""
    x.s = s = make()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, array.array("l", [0, 200_000]).tobytes())
    s.setsockopt(TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(TCP, socket.TCP_KEEPINTVL, 33)
    s.connect((ADDRESS, PORT))
    x.tried("read", lambda: s.recv(1))
    x.note(f"kept {s.getsockopt(TCP, socket.TCP_NODELAY)} {s.getsockopt(TCP, socket.TCP_KEEPINTVL)}")
    x.note(f"inheritable {os.get_inheritable(s.fileno())}")
    x.tell()


scenario(before_connecting, hold)


def echo(x):
    while data := x.s.recv(65536):
        x.s.sendall(data)


@prepares
def does_not_wait(x):
    x.s = s = make()
    s.setblocking(False)
    x.tried("connect", lambda: s.connect((ADDRESS, PORT)))
    x.poll(select.POLLOUT, select.POLLOUT, "connected")
    x.note(f"error {s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}")
    x.note(f"peer {s.getpeername()[:2] == (ADDRESS, PORT)}")
    x.tried("again", lambda: s.connect((ADDRESS, PORT)))
    s.setblocking(True)
    s.settimeout(LIMIT)
    x.write(8, 1000); x.finish(); x.read_to_end()


scenario(does_not_wait, echo)


@prepares
def connects_twice(x):
    """The old way to ask what came of it; and the first byte without any question."""
    x.s = s = make()
    s.setblocking(False)
    s.connect_ex((ADDRESS, PORT))
    select.select([], [s], [], LIMIT)
    x.note(f"second {s.connect_ex((ADDRESS, PORT)) in (0, errno.EISCONN)}")
    x.note(f"third {errno.errorcode[s.connect_ex((ADDRESS, PORT))]}")
    s.setblocking(True)
    s.settimeout(LIMIT)
    x.write(9, 10); x.finish(); x.read_to_end()


scenario(connects_twice, echo)


@prepares
def waits_by_epoll(x):
    """As nginx: registered before it connects, edge-triggered, and never asked for an error."""
    x.s = s = make()
    s.setblocking(False)
    epoll = select.epoll()
    epoll.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET | RDHUP)
    s.connect_ex((ADDRESS, PORT))
    events = epoll.poll(LIMIT)
    x.note(f"connected {bool(events and events[0][1] & select.EPOLLOUT)}")
    s.sendall(b"question")
    data, end = b"", time.monotonic() + LIMIT
    while len(data) < 8 and time.monotonic() < end:
        for fd, event in epoll.poll(1):
            assert fd == s.fileno()
            if event & select.EPOLLIN:
                try:
                    data += s.recv(100)
                except BlockingIOError:
                    pass
    x.note(f"answer {data}")
    x.tried("registered", lambda: epoll.register(s, select.EPOLLIN))
    epoll.modify(s, select.EPOLLIN | RDHUP)
    s.shutdown(socket.SHUT_WR)
    x.note(f"end {bool(epoll.poll(LIMIT)[0][1] & RDHUP)}")
    epoll.unregister(s)


scenario(waits_by_epoll, echo)


@prepares
def waits_by_epoll_unseen(x):
    """As libuv by io_uring: no function of the C library hears of what is registered."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 233, "aarch64": 21}[os.uname().machine]
    x.s = s = make()
    s.setblocking(False)
    epoll = select.epoll()

    def control(operation, events):
        event = struct.pack("=IQ" if number == 233 else "@IQ", events, s.fileno())
        result = libc.syscall(number, epoll.fileno(), operation, s.fileno(), event)
        return errno.errorcode[ctypes.get_errno()] if result else 0

    s.connect_ex((ADDRESS, PORT))
    x.note(f"added {control(1, select.EPOLLOUT)}")
    x.note(f"connected {epoll.poll(LIMIT) == [(s.fileno(), select.EPOLLOUT)]}")
    x.note(f"error {s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}")
    x.note(f"again {control(1, select.EPOLLIN)} changed {control(3, select.EPOLLIN)}")
    x.note(f"quiet {epoll.poll(0.3)}")
    s.sendall(b"question")
    x.note(f"answer {epoll.poll(LIMIT) == [(s.fileno(), select.EPOLLIN)]}")
    x.tried("read", lambda: s.recv(100))
    x.note(f"removed {control(2, 0)}")


scenario(waits_by_epoll_unseen, echo)


@prepares
def waits_for_one_event(x):
    """What is registered for a single event stays silent after it, until it is armed again."""
    x.s = s = make()
    s.setblocking(False)
    epoll = select.epoll()
    s.connect_ex((ADDRESS, PORT))
    epoll.register(s, select.EPOLLOUT | select.EPOLLONESHOT)
    x.note(f"connected {epoll.poll(LIMIT) == [(s.fileno(), select.EPOLLOUT)]}")
    x.note(f"error {s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}")
    x.note(f"quiet {epoll.poll(0.3)}")
    epoll.modify(s, select.EPOLLOUT | select.EPOLLONESHOT)
    x.note(f"armed {epoll.poll(LIMIT) == [(s.fileno(), select.EPOLLOUT)]}")


scenario(waits_for_one_event, echo)


@prepares
def nobody_listens(x):
    x.s = s = make()
    x.tried("waits", lambda: s.connect((ADDRESS, PORT + 1)))
    s = make()
    s.setblocking(False)
    x.tried("connect", lambda: s.connect((ADDRESS, PORT + 1)))
    poll = select.poll()
    poll.register(s, select.POLLOUT)
    poll.poll(LIMIT * 1000)
    x.note("error " + errno.errorcode[s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)])
    x.note(f"then {s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}")
    x.tried("write", lambda: s.send(b"x", NOSIGNAL))


scenario(nobody_listens)


def child_goes_on(x):
    """A child has the connection, too, and may outlive its parent's descriptor."""
    child = os.fork()
    if child == 0:
        x.s.sendall(b"from the child")
        peer = x.s.getpeername()[:2] == (ADDRESS, PORT)
        os._exit(7 if peer and x.s.recv(14) == b"from the child" else 8)
    x.s.close()
    x.note(f"child {os.waitpid(child, 0)[1]}")


scenario(child_goes_on, echo)

OTHER_PROGRAM = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
s.settimeout(10)
assert s.family == int(sys.argv[2]), s.family
assert s.getpeername()[:2] == (sys.argv[3], int(sys.argv[4])), s.getpeername()
s.sendall(b"after exec")
assert s.recv(10) == b"after exec"
try:
    print("read", s.recv(1))
except OSError as error:
    print("read", error.errno)
"""


def other_program_goes_on(x):
    fd = x.s.fileno()
    other = [sys.executable, "-c", OTHER_PROGRAM, str(fd), str(int(x.s.family)), ADDRESS, str(PORT)]
    said = subprocess.run(other, pass_fds=[fd], stdout=subprocess.PIPE, timeout=LIMIT)
    x.note(f"{said.returncode} {said.stdout}")


def echo_and_reset(x):
    x.s.sendall(x.s.recv(10)); time.sleep(0.3); x.reset()


scenario(other_program_goes_on, echo_and_reset)


def copies(x):
    copy = socket.socket(fileno=os.dup(x.s.fileno()))
    x.s.close()
    x.s = copy
    copy.settimeout(LIMIT)
    x.note(f"peer {copy.getpeername()[:2] == (ADDRESS, PORT)}")
    x.write(10, 70_000); x.finish(); x.read_to_end()


scenario(copies, echo)


def copy_outlives_reset(x):
    """Only whoever closes the last copy resets the connection."""
    copy = socket.socket(fileno=os.dup(x.s.fileno()))
    x.reset()
    x.s = copy
    copy.settimeout(LIMIT)
    x.write(4, 10); x.read(10); x.wait(); x.close()


scenario(copy_outlives_reset, greet_and_see)


def child_shuts_down(x):
    """What ends by another descriptor, or in another process, has ended in order, too."""
    child = os.fork()
    if child == 0:
        x.s.shutdown(socket.SHUT_RDWR)
        os._exit(0)
    x.note(f"child {os.waitpid(child, 0)[1]}")
    x.tried("read", lambda: x.s.recv(1))
    x.tried("write", lambda: x.s.send(b"x", NOSIGNAL))
    x.note(f"broadcast {x.s.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST)}")
    x.tell()


scenario(child_shuts_down, hold)
scenario(hold, child_shuts_down)


def subprocess_in_between(x):
    """Python starts programs by vfork, and closes descriptors in the child."""
    subprocess.run(["true"], close_fds=True, check=True)
    x.note(f"peer {x.s.getpeername()[:2] == (ADDRESS, PORT)}")
    x.write(11, 10); x.finish(); x.read_to_end()


scenario(subprocess_in_between, echo)


def main():
    path = os.path.join(FOLDER, "control")
    if ROLE == "server":
        listener = make()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, PORT))
        listener.listen()
        listener.settimeout(LIMIT)
        door = socket.socket(socket.AF_UNIX)
        door.bind(path)
        door.listen()
        door.settimeout(2 * LIMIT)
        control = door.accept()[0]
    else:
        control = socket.socket(socket.AF_UNIX)
        control.connect(path)
    control.settimeout(2 * LIMIT)
    for client, server in SCENARIOS:
        if client in (urgent_in, urgent_out) and os.environ.get("URGENT") == "":
            continue
        sock = None
        if ROLE == "server" and server:
            sock, address = listener.accept()
            assert address == sock.getpeername(), (address, sock.getpeername())
            assert sock.getsockname()[:2] == (ADDRESS, PORT), sock.getsockname()
        elif ROLE == "client" and not hasattr(client, "prepares"):
            sock = make()
            sock.connect((ADDRESS, PORT))
        side = Side(sock, control)
        part = client if ROLE == "client" else server
        name = client.__name__
        if part:
            try:
                part(side)
            except Exception as error:
                side.note(f"failed {error!r}")
            if side.s:
                side.s.close()
        print(json.dumps([name, side.saw]), flush=True)
        side.tell("done")
        while side.wait() != "done":
            pass


main()
