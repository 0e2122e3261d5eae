import java.io.*;
import java.net.*;
import java.nio.ByteBuffer;
import java.nio.channels.*;
import java.util.*;

/** A server with a thread for each client, and clients by both kinds of sockets that Java has. */
public class Echo {
    public static void main(String[] words) throws Exception {
        InetSocketAddress at = new InetSocketAddress(words[1], Integer.parseInt(words[2]));
        if (words[0].equals("server")) {
            serve(at);
        }
        byte[] sent = new byte[700_000];
        new Random(7).nextBytes(sent);
        try (Socket socket = new Socket()) {
            socket.connect(at, 20_000);
            socket.setTcpNoDelay(true);
            socket.setSoTimeout(20_000);
            new Thread(() -> write(socket, sent)).start();
            byte[] back = socket.getInputStream().readAllBytes();
            boolean there = socket.getRemoteSocketAddress().equals(at);
            System.out.println("blocking " + Arrays.equals(sent, back) + " " + there);
        }
        selected(at, sent, 8);
    }

    static void write(Socket socket, byte[] bytes) {
        try {
            socket.getOutputStream().write(bytes);
            socket.shutdownOutput();
        } catch (IOException error) {
            System.out.println(error);
        }
    }

    /** So many at once that do not block, in one thread. */
    static void selected(InetSocketAddress at, byte[] sent, int count) throws IOException {
        Selector selector = Selector.open();
        for (int number = 0; number < count; number++) {
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            channel.connect(at);
            ByteBuffer[] buffers = {ByteBuffer.wrap(sent), ByteBuffer.allocate(sent.length)};
            channel.register(selector, SelectionKey.OP_CONNECT, buffers);
        }
        for (int open = count; open > 0; ) {
            if (selector.select(20_000) == 0) {
                throw new IOException("nothing moves");
            }
            for (SelectionKey key : selector.selectedKeys()) {
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer[] buffers = (ByteBuffer[]) key.attachment();
                if (key.isConnectable() && channel.finishConnect()) {
                    key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                } else if (key.isValid() && key.isWritable()) {
                    channel.write(buffers[0]);
                    if (!buffers[0].hasRemaining()) {
                        channel.shutdownOutput();
                        key.interestOps(SelectionKey.OP_READ);
                    }
                } else if (key.isReadable() && channel.read(buffers[1]) <= 0) {
                    System.out.println("selected " + Arrays.equals(sent, buffers[1].array()));
                    channel.close();
                    open--;
                }
            }
            selector.selectedKeys().clear();
        }
    }

    static void serve(InetSocketAddress at) throws IOException {
        ServerSocket listener = new ServerSocket();
        listener.bind(at, 50);
        while (true) {
            Socket socket = listener.accept();
            new Thread(() -> {
                try (socket) {
                    socket.getInputStream().transferTo(socket.getOutputStream());
                } catch (IOException error) {
                    System.err.println(error);
                }
            }).start();
        }
    }
}
