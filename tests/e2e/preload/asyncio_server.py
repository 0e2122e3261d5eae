"""Greets each client, and sends back what it is sent."""
import asyncio, sys


async def serve(reader, writer):
    assert writer.get_extra_info("sockname") == (sys.argv[1], int(sys.argv[2]))
    assert writer.get_extra_info("peername")[1] > 0
    writer.write(b"hello\n")
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]))
    await server.serve_forever()


asyncio.run(main())
