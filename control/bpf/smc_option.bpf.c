// SPDX-License-Identifier: Apache-2.0
//
// The TCP option that says "I have SMC-R" (RFC 7609, 3.1), for marked sockets only.
//
// Userspace marks a socket in `sockets` before connect or listen. This program then puts the option
// on its SYN, and on a SYN-ACK only if the SYN had it; when a connection is established it
// notes in the same map whether the peer's segment had the option. After that the connection costs
// nothing: the callbacks of its socket are off again. Sockets without a mark are left alone.
//
// One program serves hosts with and without the kernel's own smc module. The module makes TCP's
// parser consume kind 254, which hides it from the "unknown option" callback; we use neither that
// nor the parse-all callback, but look into the very segment that established the connection.

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// Bits of a socket's entry. control/src/smc_option.rs has the same.
#define MARKED 1
#define ESTABLISHED 2
#define PEER_OFFERED 4

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	// Accepted children inherit the entry of their listener.
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, __u32);
} sockets SEC(".maps");

// Where somebody listens whose SYN-ACKs answer the option. `port` zero stands for all ports: what is
// intercepted comes to a listener with the port that its client has chosen.
struct place {
	__u64 network;
	__u32 port;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct place);
	__type(value, __u32);
} places SEC(".maps");

// TCP pads it with NOPs to the eight bytes that Linux peers send, too.
struct smc_option {
	__u8 kind;
	__u8 len;
	__u8 magic[4];
} __attribute__((packed));

// RFC 7609 3.1 #1: announce capability by TCP option 254
// RFC 7609 A.1 #1: encode TCP option in six bytes
#define SMC_OPTION { 254, 6, { 0xe2, 0xd4, 0xc3, 0xd9 } }
#define TCP_FLAG_SYN 0x02
#define TCP_FLAG_ACK 0x10

static __always_inline __u32 *entry(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;

	if (!socket)
		return 0;
	return bpf_sk_storage_get(&sockets, socket, 0, 0);
}

static __always_inline void want_headers(struct bpf_sock_ops *ops, int wanted)
{
	int flags = ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;

	if (wanted)
		flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	bpf_sock_ops_cb_flags_set(ops, flags);
}

// Whether a segment of the peer has the option: its SYN, or with no flags the segment at hand.
static __always_inline int offered(struct bpf_sock_ops *ops, __u64 flags)
{
	struct smc_option wanted = SMC_OPTION;

	return bpf_load_hdr_opt(ops, &wanted, sizeof(wanted), flags) == sizeof(wanted);
}

static __always_inline int marked(struct bpf_sock_ops *ops)
{
	__u32 *bits = entry(ops);

	return bits && (*bits & MARKED);
}

static __always_inline int is_place(__u64 network, __u32 port)
{
	struct place place = { .network = network, .port = port };

	return bpf_map_lookup_elem(&places, &place) != 0;
}

// Whether a connection request has come to a listener that is marked.
static __always_inline int is_listened_for(struct bpf_sock_ops *ops)
{
	__u64 network = bpf_get_netns_cookie(ops);

	return is_place(network, ops->local_port) || is_place(network, 0);
}

// Whether the segment that TCP is building is one that carries our option.
//
// A socket asks for this callback when a program has marked it: ours, another one, or one that is
// gone. For a SYN the mark can be looked up. For a SYN-ACK the socket at hand is a request without
// an entry, and the place of its listener says whether it is one of ours. Were that not asked, a
// gateway would answer for the listeners of another one that has died, and their applications would
// get the messages of a rendezvous. A SYN-ACK that is a SYN cookie stays plain: the child born of it
// could not know that its SYN had the option.
static __always_inline int carries_option(struct bpf_sock_ops *ops)
{
	if (!(ops->skb_tcp_flags & TCP_FLAG_SYN))
		return 0;
	if (!(ops->skb_tcp_flags & TCP_FLAG_ACK))
		// RFC 7609 3.5.1.1 #1: set option on SYN
		// RFC 7609 3.5.1.1 #5: no option on ACK after SYN
		return marked(ops);
	if (ops->args[0] == BPF_WRITE_HDR_TCP_SYNACK_COOKIE)
		return 0;
	// RFC 7609 3.5.1.1 #2: set option on SYN-ACK
	// RFC 7609 3.5.1.1 #3: answer only a SYN with option
	// RFC 7609 5.3 #1: TCP filters govern SMC-R too
	return is_listened_for(ops) && offered(ops, BPF_LOAD_HDR_OPT_TCP_SYN);
}

// With `answered`, the peer's segment is all that is left to be looked at: we have sent our option,
// or have answered if there was one.
static __always_inline void established(struct bpf_sock_ops *ops, __u64 flags, int answered)
{
	__u32 *bits = entry(ops);

	if (!bits || !(*bits & MARKED))
		return;
	want_headers(ops, 0);
	// RFC 7609 3.5.1.1 #6: look up peer's option after handshake
	// RFC 7609 B.1 #4: handle option unseen by applications
	*bits = MARKED | ESTABLISHED | (answered && offered(ops, flags) ? PEER_OFFERED : 0);
}

SEC("sockops")
int smc_option(struct bpf_sock_ops *ops)
{
	struct smc_option option = SMC_OPTION;
	__u32 *bits;

	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		// One that was marked before, and is no more, still asks for the callback.
		bits = entry(ops);
		if (bits)
			want_headers(ops, *bits & MARKED);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		if (carries_option(ops))
			bpf_reserve_hdr_opt(ops, sizeof(option), 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		if (carries_option(ops))
			bpf_store_hdr_opt(ops, &option, sizeof(option), 0);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		established(ops, 0, 1);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		// The listener saved the SYN for its child (TCP_SAVE_SYN).
		established(ops, BPF_LOAD_HDR_OPT_TCP_SYN, is_listened_for(ops));
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Apache-2.0";
