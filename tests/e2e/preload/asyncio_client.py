"""Twenty connections at once, each with a stream that comes back."""
import asyncio, os, sys

AT = (sys.argv[1], int(sys.argv[2]))


async def one(size):
    reader, writer = await asyncio.open_connection(*AT)
    assert writer.get_extra_info("peername") == AT, writer.get_extra_info("peername")
    greeting = await reader.readline()
    sent = os.urandom(size)
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == sent
    writer.close()
    await writer.wait_closed()
    return greeting


async def main():
    print(await asyncio.gather(*(one(50_000 * i + 1) for i in range(20))))


asyncio.run(main())
