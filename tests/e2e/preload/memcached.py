"""Four threads with two connections each to a memcached, in its own words."""
import hashlib, socket, sys, threading

AT = (sys.argv[1], int(sys.argv[2]))
said = [None] * 4


def work(number):
    first, second = (socket.create_connection(AT, 20) for _ in range(2))
    reader = second.makefile("rb")
    heard = hashlib.sha1()
    for round in range(50):
        value = bytes([number]) * (1 + round * 4000)
        first.sendall(b"set k%d 0 0 %d\r\n%s\r\n" % (number, len(value), value))
        assert first.recv(8) == b"STORED\r\n"
        second.sendall(b"get k%d\r\n" % number)
        assert reader.readline() == b"VALUE k%d 0 %d\r\n" % (number, len(value))
        heard.update(reader.read(len(value) + 2))
        assert reader.readline() == b"END\r\n"
    said[number] = heard.hexdigest()


threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(said)
