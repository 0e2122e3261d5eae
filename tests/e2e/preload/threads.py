"""A server with a thread for each connection, and threads as its clients."""
import socket, socketserver, sys, threading

AT = (sys.argv[2], int(sys.argv[3]))


class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line.upper())


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64


def work(number, said):
    with socket.create_connection(AT, 20) as sock:
        file = sock.makefile("rwb")
        for round in range(100):
            file.write(b"line %d of %d\n" % (round, number))
            file.flush()
            said.append(file.readline())
        sock.shutdown(socket.SHUT_WR)
        assert file.read() == b""


if sys.argv[1] == "server":
    Server(AT, Echo).serve_forever()
heard = [[] for _ in range(12)]
threads = [threading.Thread(target=work, args=item) for item in enumerate(heard)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print([(len(lines), lines[-1]) for lines in heard])
