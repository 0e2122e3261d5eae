"""Connections that end in every way, in threads, in forked processes, and thousands at once.

    churn.py threads|forks|crowd ADDRESS PORT       a server that serves by these
    churn.py client ADDRESS PORT WHAT COUNT         makes COUNT connections to the server for WHAT

The client prints what both sides have seen, which must not depend on what carries the connections,
and then how many connections it made. Both leave as many descriptors open as they had.
"""
import array, collections, errno, json, mmap, os, resource, signal, socket, sys, threading, time

ROLE, ADDRESS, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
LIMIT = 30
# How a connection ends, by the first byte of the client.
KINDS = "frRsShu"
OUTCOMES = ["served", "end", "ECONNRESET", "killed", "broken"]
MESSAGE = 32
seen, made, lock = collections.Counter(), 0, threading.Lock()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def read(s, length):
    data = b""
    while len(data) < length and (part := s.recv(length - len(data))):
        data += part
    return data


def end_of(s):
    """How the stream ends from here."""
    try:
        return "end" if s.recv(1) == b"" else "broken"
    except OSError as error:
        return errno.errorcode[error.errno]


def reset(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, array.array("i", [1, 0]).tobytes())
    s.close()


def serve(s):
    """One connection, as its client wishes. Returns how it has ended."""
    s.settimeout(LIMIT)
    asked = read(s, MESSAGE)
    kind = asked[:1].decode()
    s.sendall(asked if kind != "u" else asked * 4)
    if kind in "rufk":
        return end_of(s)
    if kind == "h":
        s.shutdown(socket.SHUT_WR)
        return end_of(s) if read(s, MESSAGE) == asked[::-1] else "broken"
    if kind == "R":
        read(s, 1)
        reset(s)
    if kind == "K":
        read(s, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "S":
        s.shutdown(socket.SHUT_RDWR)
    return "served"


def use(s, kind, number):
    """The client's part. Returns what it has seen."""
    asked = (b"%s%d" % (kind.encode(), number)).ljust(MESSAGE, b".")
    s.sendall(asked)
    if kind == "u":
        return "unread" if read(s, 10) == asked[:10] else "broken"
    if read(s, MESSAGE) != asked:
        return "broken"
    if kind == "k":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "r":
        reset(s)
        return "reset"
    if kind == "f":
        s.shutdown(socket.SHUT_WR)
    if kind in "RK":
        s.sendall(b"!")
    saw = end_of(s)
    if kind == "h":
        s.sendall(asked[::-1])
    return saw


def connect():
    global made
    with lock:
        made += 1
    return socket.create_connection((ADDRESS, PORT), LIMIT)


def note(kind, what):
    with lock:
        seen[f"{kind} {what}"] += 1


def in_threads(count):
    def work(first):
        for number in range(first, count, 4):
            kind = KINDS[number % len(KINDS)]
            with connect() as s:
                note(kind, use(s, kind, number))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_forks(count):
    """Children with a connection that they inherit, or of their own. Some kill themselves, and some
    have the server's child killed."""
    kinds = KINDS + "kK"
    for first in range(0, count, 30):
        children = {}
        for number in range(first, min(first + 30, count)):
            kind, s = kinds[number % len(kinds)], connect()
            if number % 2:
                s.close()  # Before a byte is sent, which servers have to bear.
                s = None
                note("-", "unused")
            child = os.fork()
            if child == 0:
                try:
                    own = s or socket.create_connection((ADDRESS, PORT), LIMIT)
                    saw = use(own, kind, number)
                    own.close()
                    os._exit(["end", "ECONNRESET", "unread", "reset", "broken"].index(saw))
                finally:
                    os._exit(99)
            children[child] = kind
            if s:
                s.close()
            else:
                global made
                made += 1
        while children:
            child, status = os.wait()
            note(children.pop(child), f"status {status:#x}")


def at_once(count):
    connections = [connect() for _ in range(count)]
    for number, s in enumerate(connections):
        s.sendall((b"f%d" % number).ljust(MESSAGE, b"."))
    for number, s in enumerate(connections):
        right = read(s, MESSAGE).startswith(b"f%d." % number)
        note("f", "answered" if right else "broken")
    # Both hosts are busy when all end: no connection then proves in time that its link works.
    said = ask_server(made)
    for number, s in enumerate(connections):
        reset(s) if number % 10 == 0 else s.close()
    return said


def ask_server(wanted):
    """What the server has seen since this was asked last, once it has seen so many connections."""
    end = time.monotonic() + LIMIT
    while True:
        with connect() as s:
            s.sendall((b"?%d " % wanted).ljust(MESSAGE, b"."))
            said = json.loads(s.makefile("rb").readline())
        if sum(said.values()) >= wanted or time.monotonic() > end:
            return said
        time.sleep(0.05)


def client(what, count):
    before = descriptors()
    said = {"threads": in_threads, "forks": in_forks, "crowd": at_once}[what](count)
    said = said or ask_server(made)
    print(json.dumps([sorted(seen.items()), sorted(said.items())]))
    print(made)
    assert descriptors() == before, os.listdir("/proc/self/fd")


def answer(s, asked, counted, forget):
    s.sendall(json.dumps(counted).encode() + b"\n")
    if sum(counted.values()) >= int(asked[1:].split()[0]):
        forget()


def serve_by_threads(listener):
    def work():
        while True:
            s = listener.accept()[0]
            with s:
                s.settimeout(LIMIT)
                if s.recv(1, socket.MSG_PEEK) == b"?":
                    with lock:
                        answer(s, read(s, MESSAGE), seen, seen.clear)
                    continue
                how = serve(s)
            with lock:
                seen[how] += 1

    for _ in range(7):
        threading.Thread(target=work, daemon=True).start()
    work()


def serve_by_forks(listener):
    """A child for each connection, which leaves in shared memory what it has seen."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    shared, children = mmap.mmap(-1, 65536), 0

    def forget():
        shared[:] = bytes(len(shared))

    while True:
        s = listener.accept()[0]
        s.settimeout(LIMIT)
        first = s.recv(1, socket.MSG_PEEK)
        if first == b"?":
            seen = collections.Counter(OUTCOMES[it - 1] for it in shared[:] if it)
            answer(s, read(s, MESSAGE), seen, forget)
        elif os.fork() == 0:
            listener.close()
            place = children % len(shared)
            if first == b"K":
                shared[place] = 1 + OUTCOMES.index("killed")
            how = serve(s)
            shared[place] = 1 + OUTCOMES.index(how if how in OUTCOMES else "broken")
            s.close()
            os._exit(0)
        children += 1
        s.close()


def serve_crowd(listener):
    """All at once in one thread, as servers with an event loop do."""
    import select
    epoll, connections = select.epoll(), {}
    listener.setblocking(False)
    epoll.register(listener, select.EPOLLIN)
    while True:
        for fd, _ in epoll.poll():
            if fd == listener.fileno():
                try:
                    while True:
                        s = listener.accept()[0]
                        s.setblocking(False)
                        connections[s.fileno()] = s
                        epoll.register(s, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
                except BlockingIOError:
                    continue
            s = connections[fd]
            try:
                while data := s.recv(MESSAGE):
                    if data.startswith(b"?"):
                        answer(s, data, seen, seen.clear)
                    else:
                        s.sendall(data)
                        seen["asked"] += 1
            except BlockingIOError:
                continue
            except ConnectionResetError:
                pass
            del connections[fd]
            s.close()


limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
if ROLE == "client":
    client(sys.argv[4], int(sys.argv[5]))
else:
    listener = socket.create_server((ADDRESS, PORT), backlog=4096)
    {"threads": serve_by_threads, "forks": serve_by_forks, "crowd": serve_crowd}[ROLE](listener)
