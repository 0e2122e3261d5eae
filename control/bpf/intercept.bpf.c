// SPDX-License-Identifier: Apache-2.0
//
// Leads connections of applications to this gateway, which they know nothing of.
//
// When an application connects to a place that a listener intercepts, the address is replaced by
// that listener's before the kernel looks for a route. The place is kept beside the application's
// socket, so that it is told it when it asks whom it is connected to. When the connection is
// established, the place goes over to the socket at the gateway's end:
//
//   connect ─► wanted ─(SYN)─► originals ─(established)─► arrived ─► the gateway accepts
//
// In between it is found by the addresses of the connection. Nothing is left there when the
// connection fails, as another one may have the same addresses later.
//
// The gateway's own sockets are marked and left alone, and so is every other network namespace. The
// programs are gone with the gateway: then connections go where applications want them to.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6

// The cookie of the gateway's network namespace, and the SO_MARK of its sockets.
const volatile __u64 network = 0;
const volatile __u32 own_mark = 0;

// An address and a port, in network byte order. IPv4 in its IPv6-mapped form.
struct place {
	__u32 address[4];
	__u32 port;
};

// A network and a port: the longest prefix counts. `prefixlen` is 32 for the port, and the bits of
// the network.
struct destination {
	__u32 prefixlen;
	__u32 port;
	__u32 address[4];
};

// What is intercepted, and the listener that it is led to, by the family of the application's
// socket: a listener has one address.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, struct destination);
	__type(value, struct place);
} intercepted SEC(".maps");

// Where an application's socket wanted to go.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct place);
} wanted SEC(".maps");

// The addresses of a connection.
struct connection {
	struct place from;
	struct place to;
};

// The same, by the connection, while it is being made.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct connection);
	__type(value, struct place);
} originals SEC(".maps");

// Where a connection wanted to go that has been led to this socket.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct place);
} arrived SEC(".maps");

static __always_inline int concerns(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;

	if (ctx->protocol != IPPROTO_TCP || bpf_get_netns_cookie(ctx) != network)
		return 0;
	// What is bound to a device cannot leave by another one, such as that of loopback.
	return socket && socket->mark != own_mark && !socket->bound_dev_if;
}

static __always_inline void mapped(__u32 *out, __u32 ip4)
{
	out[0] = out[1] = 0;
	out[2] = bpf_htonl(0xffff);
	out[3] = ip4;
}

// Where the connection to `to` is to be led; none if it is not intercepted. A listener without a
// port stands for an exception.
static __always_inline struct place *listener_for(struct place *to)
{
	struct destination destination = { .prefixlen = 32 + 128, .port = to->port };

	struct place *listener;

	__builtin_memcpy(destination.address, to->address, sizeof(to->address));
	listener = bpf_map_lookup_elem(&intercepted, &destination);
	return listener && listener->port ? listener : 0;
}

// A socket that was led to a listener, and is used once more for another place, goes there.
static __always_inline int forget(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;

	if (socket && ctx->protocol == IPPROTO_TCP)
		bpf_sk_storage_delete(&wanted, socket);
	return 1;
}

static __always_inline int keep(struct bpf_sock_addr *ctx, struct place *to)
{
	struct bpf_sock *socket = ctx->sk;

	struct place *kept;

	if (!socket)
		return 0;
	kept = bpf_sk_storage_get(&wanted, socket, to, BPF_SK_STORAGE_GET_F_CREATE);
	// A socket that is connected again may go to another place than the first time.
	if (kept)
		*kept = *to;
	return kept != 0;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct place to = { .port = ctx->user_port }, *listener;

	if (!concerns(ctx))
		return forget(ctx);
	mapped(to.address, ctx->user_ip4);
	listener = listener_for(&to);
	// A listener of IPv6 cannot be reached from a socket of IPv4.
	if (!listener || listener->address[2] != bpf_htonl(0xffff) || !keep(ctx, &to))
		return forget(ctx);
	ctx->user_ip4 = listener->address[3];
	ctx->user_port = listener->port;
	return 1;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct place to = { .port = ctx->user_port }, *listener;

	if (!concerns(ctx))
		return forget(ctx);
	to.address[0] = ctx->user_ip6[0];
	to.address[1] = ctx->user_ip6[1];
	to.address[2] = ctx->user_ip6[2];
	to.address[3] = ctx->user_ip6[3];
	listener = listener_for(&to);
	if (!listener || !keep(ctx, &to))
		return forget(ctx);
	ctx->user_ip6[0] = listener->address[0];
	ctx->user_ip6[1] = listener->address[1];
	ctx->user_ip6[2] = listener->address[2];
	ctx->user_ip6[3] = listener->address[3];
	ctx->user_port = listener->port;
	return 1;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;
	struct place *to = socket ? bpf_sk_storage_get(&wanted, socket, 0, 0) : 0;

	if (to && ctx->protocol == IPPROTO_TCP) {
		ctx->user_ip4 = to->address[3];
		ctx->user_port = to->port;
	}
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;
	struct place *to = socket ? bpf_sk_storage_get(&wanted, socket, 0, 0) : 0;

	if (to && ctx->protocol == IPPROTO_TCP) {
		ctx->user_ip6[0] = to->address[0];
		ctx->user_ip6[1] = to->address[1];
		ctx->user_ip6[2] = to->address[2];
		ctx->user_ip6[3] = to->address[3];
		ctx->user_port = to->port;
	}
	return 1;
}

static __always_inline void ends(struct bpf_sock_ops *ops, struct place *local,
				 struct place *remote)
{
	// Read at once: of two reads on two branches the compiler makes one at a computed address, which
	// the kernel refuses.
	volatile __u32 here4 = ops->local_ip4, here1 = ops->local_ip6[0];
	volatile __u32 here2 = ops->local_ip6[1], here3 = ops->local_ip6[2];
	volatile __u32 here6 = ops->local_ip6[3];
	volatile __u32 there4 = ops->remote_ip4, there1 = ops->remote_ip6[0];
	volatile __u32 there2 = ops->remote_ip6[1], there3 = ops->remote_ip6[2];
	volatile __u32 there6 = ops->remote_ip6[3];

	local->port = bpf_htons((__u16)ops->local_port);
	remote->port = bpf_htons((__u16)bpf_ntohl(ops->remote_port));
	if (ops->family == AF_INET) {
		mapped(local->address, here4);
		mapped(remote->address, there4);
		return;
	}
	local->address[0] = here1;
	local->address[1] = here2;
	local->address[2] = here3;
	local->address[3] = here6;
	remote->address[0] = there1;
	remote->address[1] = there2;
	remote->address[2] = there3;
	remote->address[3] = there6;
}

// Attached to all cgroups: the gateway's end of a connection need not be in one of those whose
// connections are intercepted.
SEC("sockops")
int follow(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;
	struct connection connection = {};
	struct place *to;

	if (!socket || bpf_get_netns_cookie(ops) != network)
		return 1;
	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		// Its source is known now, and its SYN has not left yet.
		ends(ops, &connection.from, &connection.to);
		to = bpf_sk_storage_get(&wanted, socket, 0, 0);
		if (!to) {
			bpf_map_delete_elem(&originals, &connection);
			break;
		}
		bpf_map_update_elem(&originals, &connection, to, BPF_ANY);
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
						       BPF_SOCK_OPS_STATE_CB_FLAG);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] != BPF_TCP_CLOSE)
			break;
		ends(ops, &connection.from, &connection.to);
		bpf_map_delete_elem(&originals, &connection);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		ends(ops, &connection.to, &connection.from);
		to = bpf_map_lookup_elem(&originals, &connection);
		if (!to)
			break;
		bpf_sk_storage_get(&arrived, socket, to, BPF_SK_STORAGE_GET_F_CREATE);
		bpf_map_delete_elem(&originals, &connection);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Apache-2.0";
