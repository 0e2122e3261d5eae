// SPDX-License-Identifier: Apache-2.0
//
// Spares connections between this gateway and applications of its host the pacing of bbr.
//
// Where the host's congestion control is bbr, each packet of a stream waits for a timer, also on
// loopback, where there is nothing to control. The gateway chooses for its own sockets, but not for
// those of applications, which are the senders of half of what it carries. This program does, as
// the connection is established, before bbr has begun. Only connections between two addresses of
// this host, one end of which is the gateway's, in its network namespace, are touched, and only if
// the application's socket would use bbr.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define TCP_CONGESTION 13

// The cookie of the gateway's network namespace.
const volatile __u64 network = 0;

// The ports at which the gateway listens for applications.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} listeners SEC(".maps");

// By port: whether the last socket that connected from there is the gateway's.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u8);
} connects SEC(".maps");

// The gateway's sockets that connect to applications.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} sockets SEC(".maps");

static __always_inline int within_host(struct bpf_sock_ops *ops)
{
	// Read at once: of two reads on two branches the compiler makes one at a computed address, which
	// the kernel refuses.
	volatile __u32 remote = ops->remote_ip4, local = ops->local_ip4;
	volatile __u32 differs = (ops->remote_ip6[0] ^ ops->local_ip6[0]) |
				 (ops->remote_ip6[1] ^ ops->local_ip6[1]) |
				 (ops->remote_ip6[2] ^ ops->local_ip6[2]) |
				 (ops->remote_ip6[3] ^ ops->local_ip6[3]);
	__u32 family = ops->family;

	if (family == AF_INET)
		return (remote & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000) || remote == local;
	return family == AF_INET6 && !differs;
}

static __always_inline int is_ours(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;

	return socket && bpf_sk_storage_get(&sockets, socket, 0, 0) ? 1 : 0;
}

static __always_inline int far_end_is_in(struct bpf_sock_ops *ops, void *ports)
{
	__u32 port = bpf_ntohl(ops->remote_port);
	__u8 *ours = bpf_map_lookup_elem(ports, &port);

	return ours && *ours;
}

static __always_inline void spare(struct bpf_sock_ops *ops)
{
	char now[16] = {}, plain[] = "reno";

	if (bpf_getsockopt(ops, IPPROTO_TCP, TCP_CONGESTION, now, sizeof(now)))
		return;
	if (now[0] == 'b' && now[1] == 'b' && now[2] == 'r')
		bpf_setsockopt(ops, IPPROTO_TCP, TCP_CONGESTION, plain, sizeof(plain));
}

// An application that gets the port of a closed connection of ours is not us.
static __always_inline void note(struct bpf_sock_ops *ops, int ours)
{
	__u32 port = ops->local_port;
	__u8 *entry = bpf_map_lookup_elem(&connects, &port);

	if (entry && *entry != ours)
		*entry = ours;
}

SEC("sockops")
int loopback(struct bpf_sock_ops *ops)
{
	int ours;

	if (bpf_get_netns_cookie(ops) != network || !within_host(ops))
		return 1;
	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		ours = is_ours(ops);
		note(ops, ours);
		if (ours)
			spare(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		if (far_end_is_in(ops, &listeners))
			spare(ops);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		if (far_end_is_in(ops, &connects))
			spare(ops);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Apache-2.0";
