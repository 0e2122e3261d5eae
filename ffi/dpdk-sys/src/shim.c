// What DPDK's headers define as inline functions, structures and macros, behind a table of plain
// functions. No structure of DPDK crosses into Rust: the table below is the whole interface, and
// `lib.rs` repeats it. Change both, and ABI, together.
//
// A port has one queue in each direction here. One thread at a time uses it, except `link_up` of
// DPDK itself, which its own interrupt thread changes.

// The distribution's configuration says that libbsd gives strlcpy; without libbsd-dev, DPDK's own
// does.
#undef RTE_USE_LIBBSD
// Only so does a program learn that a PCI device is wanted back (rte_dev_event_callback_register).
#define ALLOW_EXPERIMENTAL_API

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_alarm.h>
#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_ip.h>
#include <rte_lcore.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_version.h>

#define ABI 3
#define BURST_MAX 64
// What DPDK's own programs ask for at once, so that every driver is used to it.
#define RECEIVE_MAX 32
#define DESCRIPTORS 1024
// Mbufs beside those that both rings may hold: two bursts, and caches of some threads.
#define SPARE_MBUFS 2047
#define CACHE 128
#define ETHERNET_HEADER 14
#define IPV4_HEADER 20
// The most bytes of a frame beside what the MTU counts: header, VLAN tags, checksum.
#define FRAME_OVERHEAD 32
#define LOG_LEN 4096
// How often a client of shared memory that has no server asks for its link before it looks for one.
#define SEEK_EVERY 16
// How often it asks after it has found one, before it tries another time. A server whose client hangs
// up before it was greeted dies: its driver closes a descriptor that its interrupt thread goes on
// waiting for.
#define SEEK_AGAIN 256

struct frame {
    uint8_t *bytes;
    uint32_t len;
};

// What a port is to be like. Zero is no wish.
struct wishes {
    uint16_t mtu;
    uint16_t vlan;
    // The Ethernet address of the group in which neighbours look for its IPv6 address.
    uint8_t group[6];
};

struct info {
    uint8_t mac[6];
    uint16_t mtu;
    uint32_t ipv4_checksum;
    char driver[32];
};

struct figures {
    uint64_t missed;
    uint64_t receive_errors;
    uint64_t send_errors;
    uint64_t without_buffer;
};

struct port {
    uint16_t id;
    uint16_t mtu;
    uint16_t received_len;
    uint16_t vacant_len;
    // The VLAN that it is in; 0 for none.
    uint16_t vlan;
    bool sums_ipv4;
    // The client's end of shared memory, which has to look for the server again and again.
    bool seeks;
    // How many more times it asks for its link before it does.
    uint32_t seek_in;
    // Set by DPDK's interrupt thread, read by the others.
    bool removed;
    struct rte_device *device;
    // The next one in `open_ports`.
    struct port *next;
    struct rte_mempool *pool;
    struct rte_mbuf *received[BURST_MAX];
    struct rte_mbuf *vacant[BURST_MAX];
    uint64_t dropped;
};

// The log of DPDK since the last `take_log`. What does not fit is lost.
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_LEN];
static size_t log_used;

static ssize_t keep_log(void *cookie, const char *text, size_t len) {
    (void)cookie;
    // Nobody will ask for these words: the process ends.
    if (len >= 5 && memcmp(text, "PANIC", 5) == 0) {
        fwrite(text, 1, len, stderr);
    }
    pthread_mutex_lock(&log_lock);
    size_t room = LOG_LEN - log_used;
    size_t kept = len < room ? len : room;
    memcpy(log_text + log_used, text, kept);
    log_used += kept;
    pthread_mutex_unlock(&log_lock);
    return (ssize_t)len;
}

static uint32_t take_log(char *out, uint32_t len) {
    pthread_mutex_lock(&log_lock);
    uint32_t taken = log_used < len ? (uint32_t)log_used : len;
    memcpy(out, log_text, taken);
    log_used = 0;
    pthread_mutex_unlock(&log_lock);
    return taken;
}

static const char *version(void) { return rte_version(); }

// Starts DPDK. Returns 0 or an errno. DPDK pins the calling thread, and allows one call.
static int start(int argc, char **argv) {
    cookie_io_functions_t functions = {.write = keep_log};
    FILE *stream = fopencookie(NULL, "w", functions);
    if (stream == NULL) {
        return errno;
    }
    setvbuf(stream, NULL, _IONBF, 0);
    rte_openlog_stream(stream);
    // For an argument that it does not know, EAL prints all that it knows. Only the stream of C is
    // replaced meanwhile: what other threads write to the descriptor arrives.
    FILE *saved = stdout, *null = fopen("/dev/null", "we");
    if (null != NULL) {
        stdout = null;
    }
    int status = rte_eal_init(argc, argv);
    int reason = rte_errno;
    if (null != NULL) {
        stdout = saved;
        fclose(null);
    }
    if (status < 0) {
        return reason != 0 ? reason : EINVAL;
    }
    return 0;
}

// Makes the calling thread known to DPDK, which then gives it caches of its own.
static int enter_thread(void) { return rte_thread_register() == 0 ? 0 : rte_errno; }

static void leave_thread(void) { rte_thread_unregister(); }

static int on_event(uint16_t id, enum rte_eth_event_type type, void *arg, void *result) {
    (void)id;
    (void)result;
    struct port *port = arg;
    if (type == RTE_ETH_EVENT_INTR_RMV) {
        __atomic_store_n(&port->removed, true, __ATOMIC_RELEASE);
    }
    return 0;
}

// Ports whose devices may be removed.
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static struct port *open_ports;

// DPDK says so of a PCI device that the kernel wants back: it waits until the port is closed.
static void on_device_event(const char *name, enum rte_dev_event_type type, void *arg) {
    (void)arg;
    if (name == NULL || type != RTE_DEV_EVENT_REMOVE) {
        return;
    }
    pthread_mutex_lock(&open_lock);
    for (struct port *port = open_ports; port != NULL; port = port->next) {
        if (strcmp(rte_dev_name(port->device), name) == 0) {
            __atomic_store_n(&port->removed, true, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&open_lock);
}

// Has `on_device_event` look for this port. It is registered once, for all devices, and stays: in
// DPDK before 23 the end of one registration could take those of other devices along.
static void hear_of_removal(struct port *port) {
    static bool hears;
    pthread_mutex_lock(&open_lock);
    port->next = open_ports;
    open_ports = port;
    bool first = !hears;
    hears = true;
    pthread_mutex_unlock(&open_lock);
    if (first) {
        rte_dev_event_callback_register(NULL, on_device_event, NULL);
    }
}

static void hear_no_more(const struct port *port) {
    pthread_mutex_lock(&open_lock);
    for (struct port **at = &open_ports; *at != NULL; at = &(*at)->next) {
        if (*at == port) {
            *at = port->next;
            break;
        }
    }
    pthread_mutex_unlock(&open_lock);
}

// Lets frames in that the port would filter: of its VLAN, and of the group of its IPv6 address. A
// virtual function may not be allowed to receive the frames of all groups, and receives none of a
// VLAN that it has not asked for. Returns 0 or a negative errno, and says in `step` what failed.
static int let_in(struct port *port, const struct wishes *wishes, bool filters_vlans,
                  const char **step) {
    if (filters_vlans) {
        *step = "it refuses its VLAN";
        int status = rte_eth_dev_vlan_filter(port->id, port->vlan, 1);
        // A driver may say that it can what the host has not granted to its virtual function.
        if (status != 0 && status != -ENOTSUP) {
            return status;
        }
    }
    // Also of all nodes: neighbours announce there that their Ethernet address is another one.
    struct rte_ether_addr groups[] = {{{0}}, {{0x33, 0x33, 0, 0, 0, 1}}};
    memcpy(groups[0].addr_bytes, wishes->group, sizeof wishes->group);
    if (rte_is_zero_ether_addr(&groups[0])) {
        return 0;
    }
    int one = rte_eth_dev_set_mc_addr_list(port->id, groups, 2);
    int all = rte_eth_allmulticast_enable(port->id);
    // A driver that knows neither has no filter.
    if (one == 0 || all == 0 || (one == -ENOTSUP && all == -ENOTSUP)) {
        return 0;
    }
    *step = "it refuses multicast, by which neighbours look for its IPv6 address";
    return one;
}

// Configures one queue in each direction and starts the port. Returns 0 or a negative errno, and
// says in `step` what failed.
static int set_up(struct port *port, const struct wishes *wishes, const char **step) {
    struct rte_eth_dev_info info;
    *step = "it does not describe itself";
    int status = rte_eth_dev_info_get(port->id, &info);
    if (status != 0) {
        return status;
    }
    port->device = info.device;
    uint16_t mtu = RTE_ETHER_MTU;
    *step = "its MTU is not known";
    status = rte_eth_dev_get_mtu(port->id, &mtu);
    if (status != 0) {
        return status;
    }
    if (wishes->mtu != 0) {
        mtu = wishes->mtu < info.max_mtu ? wishes->mtu : info.max_mtu;
    }
    port->mtu = mtu;
    // Shared memory carries frames as long as its buffers, but its driver refuses to hear of it.
    if (strcmp(info.driver_name, "net_memif") == 0 && mtu > RTE_ETHER_MTU) {
        mtu = RTE_ETHER_MTU;
    }
    struct rte_eth_conf conf = {
        .rxmode = {.mtu = mtu, .offloads = info.rx_offload_capa & RTE_ETH_RX_OFFLOAD_IPV4_CKSUM},
        .txmode = {.offloads = info.tx_offload_capa & RTE_ETH_TX_OFFLOAD_IPV4_CKSUM},
        // Only then do drivers of hardware that can be pulled out tell `on_event`.
        .intr_conf = {.rmv = (*info.dev_flags & RTE_ETH_DEV_INTR_RMV) != 0},
    };
    bool filters_vlans =
        port->vlan != 0 && (info.rx_offload_capa & RTE_ETH_RX_OFFLOAD_VLAN_FILTER) != 0;
    conf.rxmode.offloads |= filters_vlans ? RTE_ETH_RX_OFFLOAD_VLAN_FILTER : 0;
    port->sums_ipv4 = conf.txmode.offloads != 0;
    *step = "it refuses its configuration";
    status = rte_eth_dev_configure(port->id, 1, 1, &conf);
    if (status != 0) {
        return status;
    }
    uint16_t receive = DESCRIPTORS, send = DESCRIPTORS;
    *step = "it refuses the lengths of its queues";
    status = rte_eth_dev_adjust_nb_rx_tx_desc(port->id, &receive, &send);
    if (status != 0) {
        return status;
    }
    char name[RTE_MEMPOOL_NAMESIZE];
    snprintf(name, sizeof name, "port%u", port->id);
    unsigned count = (unsigned)receive + send + SPARE_MBUFS;
    uint32_t room = RTE_PKTMBUF_HEADROOM + port->mtu + FRAME_OVERHEAD;
    if (room < RTE_MBUF_DEFAULT_BUF_SIZE) {
        room = RTE_MBUF_DEFAULT_BUF_SIZE;
    }
    room = room > UINT16_MAX ? UINT16_MAX : room;
    *step = "no memory for its packets: there are too few huge pages, or less than -m allows";
    port->pool = rte_pktmbuf_pool_create(name, count, CACHE, 0, (uint16_t)room, SOCKET_ID_ANY);
    if (port->pool == NULL) {
        return -rte_errno;
    }
    *step = "its receive queue cannot be set up";
    status = rte_eth_rx_queue_setup(port->id, 0, receive, SOCKET_ID_ANY, NULL, port->pool);
    if (status != 0) {
        return status;
    }
    *step = "its send queue cannot be set up";
    status = rte_eth_tx_queue_setup(port->id, 0, send, SOCKET_ID_ANY, NULL);
    if (status != 0) {
        return status;
    }
    // A port that sends no such event is asked in `link`.
    rte_eth_dev_callback_register(port->id, RTE_ETH_EVENT_INTR_RMV, on_event, port);
    hear_of_removal(port);
    *step = "it does not start";
    status = rte_eth_dev_start(port->id);
    // Without a server this fails, and the link is down.
    if (status != 0 && !port->seeks) {
        return status;
    }
    port->seek_in = status == 0 ? SEEK_AGAIN : 0;
    return let_in(port, wishes, filters_vlans, step);
}

// What the interrupt thread does to a port, and whether it has.
struct errand {
    uint16_t id;
    int status;
    sem_t done;
};

static void close_now(void *arg) {
    struct errand *errand = arg;
    rte_eth_dev_stop(errand->id);
    rte_eth_dev_close(errand->id);
    sem_post(&errand->done);
}

static void restart_now(void *arg) {
    struct errand *errand = arg;
    rte_eth_dev_stop(errand->id);
    errand->status = rte_eth_dev_start(errand->id);
    sem_post(&errand->done);
}

// Runs `work` for a port on DPDK's interrupt thread. There the driver of shared memory learns that
// the other end has gone, and frees then, without a lock, what stopping and closing free too.
// Returns the errand's status.
static int on_interrupt_thread(uint16_t id, void (*work)(void *)) {
    struct errand errand = {.id = id};
    sem_init(&errand.done, 0, 0);
    if (rte_eal_alarm_set(1, work, &errand) == 0) {
        while (sem_wait(&errand.done) != 0) {
            // A signal came.
        }
    } else {
        work(&errand);
    }
    sem_destroy(&errand.done);
    return errand.status;
}

// Gives up a port, in whatever state it is, and its device.
static void close_port(struct port *port) {
    rte_pktmbuf_free_bulk(port->received, port->received_len);
    rte_pktmbuf_free_bulk(port->vacant, port->vacant_len);
    // A callback is not unregistered while it runs, and would have a port that was freed then.
    while (rte_eth_dev_callback_unregister(port->id, RTE_ETH_EVENT_INTR_RMV, on_event, port) ==
           -EAGAIN) {
        rte_pause();
    }
    hear_no_more(port);
    on_interrupt_thread(port->id, close_now);
    rte_mempool_free(port->pool);
    if (port->device != NULL) {
        rte_dev_remove(port->device);
    }
    free(port);
}

// Gives up a device that has no port which we could close. Otherwise nobody could open it again.
static void give_back(const char *name) {
    // Only PCI addresses have colons.
    rte_eal_hotplug_remove(strchr(name, ':') != NULL ? "pci" : "vdev", name);
}

// Finds the port of the device that is named so. Most drivers name a port like its device; mana and
// mlx4 add which of its ports it is. Returns 0 or a negative errno, and says in `step` what failed.
static int find_port(const char *name, uint16_t *id, const char **step) {
    *step = "its driver made no port";
    int status = rte_eth_dev_get_port_by_name(name, id);
    if (status == 0) {
        return 0;
    }
    uint16_t other, found = 0;
    RTE_ETH_FOREACH_DEV(other) {
        struct rte_eth_dev_info info;
        if (rte_eth_dev_info_get(other, &info) == 0 && info.device != NULL &&
            strcmp(rte_dev_name(info.device), name) == 0) {
            *id = other;
            found++;
        }
    }
    if (found > 1) {
        *step = "it has several ports, of which none can be named; only devices with one can be used";
        return -EINVAL;
    }
    return found == 1 ? 0 : status;
}

// Opens `device`: what EAL takes behind --vdev, or a PCI address. `name` is the part before the
// first comma. Returns 0 or an errno, and says in `step` what failed.
static int open_port(const char *device, const char *name, const struct wishes *wishes,
                     struct port **out, const char **step) {
    *step = "no driver takes it; write what EAL takes behind --vdev, or the address of a PCI device "
            "that is bound to vfio-pci";
    int status = rte_dev_probe(device);
    if (status != 0) {
        return -status;
    }
    struct port *port = calloc(1, sizeof *port);
    if (port == NULL) {
        *step = "no memory";
        give_back(name);
        return ENOMEM;
    }
    port->vlan = wishes->vlan;
    status = find_port(name, &port->id, step);
    if (status != 0) {
        free(port);
        give_back(name);
        return -status;
    }
    port->seeks = strncmp(name, "net_memif", 9) == 0 && strstr(device, "role=server") == NULL &&
                  strstr(device, "role=master") == NULL;
    status = set_up(port, wishes, step);
    if (status != 0) {
        close_port(port);
        return status < 0 ? -status : EIO;
    }
    *out = port;
    return 0;
}

static int describe(struct port *port, struct info *out) {
    struct rte_eth_dev_info info;
    struct rte_ether_addr mac;
    int status = rte_eth_dev_info_get(port->id, &info);
    status = status != 0 ? status : rte_eth_macaddr_get(port->id, &mac);
    if (status != 0) {
        return -status;
    }
    memcpy(out->mac, mac.addr_bytes, sizeof out->mac);
    out->mtu = port->mtu;
    out->ipv4_checksum = port->sums_ipv4;
    snprintf(out->driver, sizeof out->driver, "%s", info.driver_name);
    return 0;
}

// Takes the tag off a frame, unless the port has. Returns its VLAN, or 0.
static uint16_t untag(struct rte_mbuf *mbuf) {
    if ((mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED) == 0) {
        bool is_short = mbuf->data_len < sizeof(struct rte_ether_hdr) + sizeof(struct rte_vlan_hdr);
        if (is_short || rte_vlan_strip(mbuf) != 0) {
            return 0;
        }
    }
    // The other bits are a priority.
    return mbuf->vlan_tci & 0x0fff;
}

// Receives one burst, which replaces the last one. Returns how many frames it has.
static uint32_t receive(struct port *port, struct frame *out) {
    rte_pktmbuf_free_bulk(port->received, port->received_len);
    uint16_t count = 0, more = RECEIVE_MAX;
    while (more == RECEIVE_MAX && count + RECEIVE_MAX <= BURST_MAX) {
        more = rte_eth_rx_burst(port->id, 0, port->received + count, RECEIVE_MAX);
        count += more;
    }
    uint16_t kept = 0;
    for (uint16_t i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = port->received[i];
        uint64_t sum = mbuf->ol_flags & RTE_MBUF_F_RX_IP_CKSUM_MASK;
        bool wrong = sum == RTE_MBUF_F_RX_IP_CKSUM_BAD;
        if (wrong || rte_pktmbuf_linearize(mbuf) != 0) {
            rte_pktmbuf_free(mbuf);
            port->dropped++;
            continue;
        }
        if (untag(mbuf) != port->vlan) {
            rte_pktmbuf_free(mbuf);
            continue;
        }
        out[kept].bytes = rte_pktmbuf_mtod(mbuf, uint8_t *);
        out[kept].len = rte_pktmbuf_data_len(mbuf);
        port->received[kept++] = mbuf;
    }
    port->received_len = kept;
    return kept;
}

// Gives room for up to `count` frames. Returns how many it has room for; it stays theirs until
// `send`.
static uint32_t vacate(struct port *port, struct frame *out, uint32_t count) {
    uint16_t wanted = count < BURST_MAX ? (uint16_t)count : BURST_MAX;
    if (port->vacant_len < wanted) {
        struct rte_mbuf **more = port->vacant + port->vacant_len;
        if (rte_pktmbuf_alloc_bulk(port->pool, more, wanted - port->vacant_len) == 0) {
            port->vacant_len = wanted;
        }
    }
    uint16_t given = port->vacant_len < wanted ? port->vacant_len : wanted;
    for (uint16_t i = 0; i < given; i++) {
        out[i].bytes = rte_pktmbuf_mtod(port->vacant[i], uint8_t *);
        out[i].len = rte_pktmbuf_tailroom(port->vacant[i]);
    }
    return given;
}

// Sends the first `count` frames that `vacate` gave room for. Returns how many the port took; the
// others were not sent. With `ipv4` the port fills in the checksum of each IPv4 header.
static uint32_t transmit(struct port *port, const uint32_t *lens, uint32_t count, uint32_t ipv4) {
    if (count > port->vacant_len) {
        abort(); // The caller wrote to memory that it did not have.
    }
    for (uint32_t i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = port->vacant[i];
        mbuf->pkt_len = lens[i];
        mbuf->data_len = (uint16_t)lens[i];
        if (ipv4) {
            mbuf->l2_len = ETHERNET_HEADER;
            mbuf->l3_len = IPV4_HEADER;
            mbuf->ol_flags = RTE_MBUF_F_TX_IPV4 | RTE_MBUF_F_TX_IP_CKSUM;
        }
        if (port->vlan != 0) {
            // It moves 12 bytes into the headroom, which nothing else uses, and adds to `l2_len`.
            mbuf->vlan_tci = port->vlan;
            rte_vlan_insert(&mbuf);
        }
    }
    uint16_t ready = (uint16_t)count;
    if (ipv4) {
        ready = rte_eth_tx_prepare(port->id, 0, port->vacant, ready);
    }
    uint16_t taken = rte_eth_tx_burst(port->id, 0, port->vacant, ready);
    for (uint32_t i = taken; i < count; i++) {
        struct rte_mbuf *mbuf = port->vacant[i];
        mbuf->pkt_len = 0;
        mbuf->data_len = 0;
        mbuf->ol_flags = 0;
        rte_pktmbuf_reset_headroom(mbuf);
    }
    port->vacant_len -= taken;
    memmove(port->vacant, port->vacant + taken, port->vacant_len * sizeof port->vacant[0]);
    return taken;
}

// Whether the port's link is up: 1 or 0, or -1 if the device is gone.
static int link_state(struct port *port) {
    struct rte_eth_link link;
    if (__atomic_load_n(&port->removed, __ATOMIC_ACQUIRE)) {
        return -1;
    }
    int status = rte_eth_link_get_nowait(port->id, &link);
    if (status == -ENODEV || status == -EIO) {
        return -1;
    }
    bool is_up = status == 0 && link.link_status == RTE_ETH_LINK_UP;
    // Drivers that do not notice a removal by themselves look for it when they are asked, which may
    // take a system call. Without its device a port has no link.
    if (!is_up && rte_eth_dev_is_removed(port->id) == 1) {
        return -1;
    }
    if (is_up) {
        port->seek_in = 0;
    } else if (port->seeks && port->seek_in-- == 0) {
        status = on_interrupt_thread(port->id, restart_now);
        port->seek_in = status == 0 ? SEEK_AGAIN : SEEK_EVERY;
    }
    return is_up;
}

static void count(struct port *port, struct figures *out) {
    struct rte_eth_stats stats;
    memset(&stats, 0, sizeof stats);
    // A port that counts nothing leaves zeros.
    rte_eth_stats_get(port->id, &stats);
    out->missed = stats.imissed;
    out->receive_errors = stats.ierrors + port->dropped;
    out->send_errors = stats.oerrors;
    out->without_buffer = stats.rx_nombuf;
}

struct table {
    uint32_t abi;
    uint32_t burst_max;
    const char *(*version)(void);
    uint32_t (*take_log)(char *, uint32_t);
    int (*start)(int, char **);
    int (*enter_thread)(void);
    void (*leave_thread)(void);
    int (*open_port)(const char *, const char *, const struct wishes *, struct port **,
                     const char **);
    void (*close_port)(struct port *);
    int (*describe)(struct port *, struct info *);
    uint32_t (*receive)(struct port *, struct frame *);
    uint32_t (*vacate)(struct port *, struct frame *, uint32_t);
    uint32_t (*transmit)(struct port *, const uint32_t *, uint32_t, uint32_t);
    int (*link_state)(struct port *);
    void (*count)(struct port *, struct figures *);
};

__attribute__((visibility("default"))) const struct table smcgate_dpdk = {
    .abi = ABI,
    .burst_max = BURST_MAX,
    .version = version,
    .take_log = take_log,
    .start = start,
    .enter_thread = enter_thread,
    .leave_thread = leave_thread,
    .open_port = open_port,
    .close_port = close_port,
    .describe = describe,
    .receive = receive,
    .vacate = vacate,
    .transmit = transmit,
    .link_state = link_state,
    .count = count,
};
