// Turns the stream sockets of programs that know only TCP into AF_SMC sockets, as `smc_run` does.
// A Linux guest has no smc-tools. Loaded by LD_PRELOAD; scripts/linux-rig compiles it.
#define _GNU_SOURCE
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SMC_OVER_IPV4 = 0, SMC_OVER_IPV6 = 1, TYPE_MASK = 0xf };

int socket(int domain, int type, int protocol)
{
    int internet = domain == AF_INET || domain == AF_INET6;
    int tcp = protocol == IPPROTO_IP || protocol == IPPROTO_TCP;
    if (internet && tcp && (type & TYPE_MASK) == SOCK_STREAM) {
        protocol = domain == AF_INET6 ? SMC_OVER_IPV6 : SMC_OVER_IPV4;
        domain = AF_SMC;
    }
    return (int)syscall(SYS_socket, domain, type, protocol);
}
