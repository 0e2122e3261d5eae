// SPDX-License-Identifier: Apache-2.0
//
// Leads connections from outside, to servers on this host, to a listener of this gateway.
//
// When the kernel looks for the socket that a SYN is for, it finds the gateway's listener if the
// place is one that is intercepted. The connection keeps its addresses. What comes from this host is
// left alone: an application, or the gateway itself that goes on to the server. Before Linux 5.17 the
// program cannot see by which device a SYN has come, so it goes by addresses: from this host it comes
// from one of its own, except where the gateway speaks for a client. The program is gone with the
// gateway: then clients reach servers themselves.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define IPPROTO_TCP 6

// A network and a port, in network byte order: the longest prefix counts. `prefixlen` is 32 for the
// port, and the bits of the network. IPv4 in its IPv6-mapped form.
struct destination {
	__u32 prefixlen;
	__u32 port;
	__u32 address[4];
};

// What is intercepted. The values say nothing.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, struct destination);
	__type(value, __u32);
} intercepted SEC(".maps");

// An address and a port, in network byte order.
struct place {
	__u32 address[4];
	__u32 port;
};

// Both ends of a connection.
struct ends {
	struct place from;
	struct place to;
};

// Connections that the gateway makes in the name of clients. The same client may use the same port
// towards another server: that connection is its own.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct ends);
	__type(value, __u32);
} spoken_for SEC(".maps");

struct address {
	__u32 words[4];
};

// The addresses of this host, but for those of the loopback device.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct address);
	__type(value, __u32);
} own SEC(".maps");

// The listener.
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} listener SEC(".maps");

static __always_inline int is_v4_loopback(struct place *at)
{
	return !at->address[0] && !at->address[1] && at->address[2] == bpf_htonl(0xffff) &&
	       bpf_ntohl(at->address[3]) >> 24 == 127;
}

static __always_inline int is_from_here(struct place *from)
{
	struct address address = {
		{ from->address[0], from->address[1], from->address[2], from->address[3] },
	};

	return is_v4_loopback(from) || bpf_map_lookup_elem(&own, &address) != 0;
}

// An address that means nothing without a device, which nobody could connect to in turn.
static __always_inline int is_link_local(struct destination *to)
{
	return (bpf_ntohl(to->address[0]) & 0xffc00000) == 0xfe800000;
}

SEC("sk_lookup")
int steer(struct bpf_sk_lookup *ctx)
{
	struct destination to = { .prefixlen = 32 + 128 };
	struct place from = { .port = (__u16)ctx->remote_port };
	struct bpf_sock *socket;
	__u32 index = 0;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	// Read at once: of two reads on two branches the compiler makes one at a computed address, which
	// the kernel refuses.
	volatile __u32 ip4 = ctx->local_ip4, first = ctx->local_ip6[0], second = ctx->local_ip6[1];
	volatile __u32 third = ctx->local_ip6[2], fourth = ctx->local_ip6[3];
	volatile __u32 from4 = ctx->remote_ip4, from1 = ctx->remote_ip6[0];
	volatile __u32 from2 = ctx->remote_ip6[1], from3 = ctx->remote_ip6[2];
	volatile __u32 from6 = ctx->remote_ip6[3];

	to.port = bpf_htons(ctx->local_port);
	if (ctx->family == AF_INET) {
		to.address[2] = bpf_htonl(0xffff);
		to.address[3] = ip4;
		from.address[2] = bpf_htonl(0xffff);
		from.address[3] = from4;
	} else {
		to.address[0] = first;
		to.address[1] = second;
		to.address[2] = third;
		to.address[3] = fourth;
		from.address[0] = from1;
		from.address[1] = from2;
		from.address[2] = from3;
		from.address[3] = from6;
	}
	// A local route may be for addresses that no device has.
	if (from.address[3] == to.address[3] && from.address[2] == to.address[2] &&
	    from.address[1] == to.address[1] && from.address[0] == to.address[0])
		return SK_PASS;
	if (is_from_here(&from) || is_link_local(&to))
		return SK_PASS;

	struct ends ends = { .from = from, .to.port = to.port };

	__builtin_memcpy(ends.to.address, to.address, sizeof(to.address));
	if (bpf_map_lookup_elem(&spoken_for, &ends))
		return SK_PASS;
	if (!bpf_map_lookup_elem(&intercepted, &to))
		return SK_PASS;
	socket = bpf_map_lookup_elem(&listener, &index);
	if (!socket)
		return SK_PASS;
	// Fails if the listener is of another family: then the server is found.
	bpf_sk_assign(ctx, socket, 0);
	bpf_sk_release(socket);
	return SK_PASS;
}

char _license[] SEC("license") = "Apache-2.0";
