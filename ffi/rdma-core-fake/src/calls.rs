//! The functions, with the signatures of libibverbs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::{mem, ptr, slice};

use rdma_core_sys::*;

use crate::network::{Network, Pair, Queue, Receive, Region, Send, with};
use crate::objects::{at, end, make};
use crate::trouble::Trouble;

pub(crate) fn functions() -> Functions {
    Functions {
        ibv_get_device_list,
        ibv_free_device_list,
        ibv_get_device_name,
        ibv_open_device,
        ibv_close_device,
        ibv_query_device,
        ibv_query_port,
        _ibv_query_gid_table,
        ibv_alloc_pd,
        ibv_dealloc_pd,
        ibv_reg_mr_iova2,
        ibv_dereg_mr,
        ibv_create_comp_channel,
        ibv_destroy_comp_channel,
        ibv_create_cq,
        ibv_destroy_cq,
        ibv_get_cq_event,
        ibv_ack_cq_events,
        ibv_create_qp,
        ibv_modify_qp,
        ibv_destroy_qp,
        ibv_get_async_event,
        ibv_ack_async_event,
    }
}

fn device_of(context: *mut ibv_context) -> usize {
    usize::try_from(at(context).cmd_fd).expect("an index")
}

unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let names = with(|network| -> Vec<String> {
        network.devices.iter().map(|device| device.name.clone()).collect()
    });
    *at(count) = c_int::try_from(names.len()).expect("few");
    let devices = names.iter().map(|name| {
        make(|device: &mut ibv_device| {
            for (to, from) in device.name.iter_mut().zip(name.bytes()) {
                *to = c_char::from_ne_bytes([from]);
            }
            device.dev_name = device.name;
        })
    });
    // As real ones, a device must survive the list if it was opened. Ours live for ever.
    let mut list: Vec<_> = devices.chain([ptr::null_mut()]).collect();
    let start = list.as_mut_ptr();
    mem::forget(list);
    start
}

unsafe extern "C" fn ibv_free_device_list(_: *mut *mut ibv_device) {}

unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    at(device).name.as_ptr()
}

unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let letters = at(device).name.iter().map(|letter| letter.to_ne_bytes()[0]);
    let name: Vec<u8> = letters.take_while(|byte| *byte != 0).collect();
    let number = with(|network| {
        let number = network.devices.iter().position(|one| one.name.as_bytes() == name);
        let number = number.expect("listed");
        network.count(number, "contexts", true);
        number
    });
    let context: *mut ibv_context = Box::into_raw(Box::new(ibv_context {
        device,
        ops: ibv_context_ops {
            before_poll_cq: [ptr::null_mut(); 11],
            poll_cq,
            req_notify_cq,
            before_post_send: [ptr::null_mut(); 12],
            post_send,
            post_recv,
            after_post_recv: [ptr::null_mut(); 5],
        },
        cmd_fd: c_int::try_from(number).expect("few"),
        async_fd: with(|network| network.devices[number].wakeup),
        num_comp_vectors: 1,
        mutex: [0; 5],
        abi_compat: ptr::null_mut(),
    }));
    context
}

unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let device = device_of(context);
    with(|network| network.count(device, "contexts", false));
    end(context);
    0
}

unsafe extern "C" fn ibv_query_device(_: *mut ibv_context, out: *mut ibv_device_attr) -> c_int {
    let out = at(out);
    (out.max_cq, out.max_cqe, out.max_qp_wr) = (100, 32_767, 16_384);
    0
}

unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    out: *mut ibv_port_attr,
) -> c_int {
    let device = device_of(context);
    let found = with(|network| network.devices[device].port(port).copied());
    let Some(port) = found else { return libc::EINVAL };
    let out = at(out);
    out.state = if port.up { IBV_PORT_ACTIVE } else { 1 };
    (out.active_mtu, out.link_layer) = (port.mtu, IBV_LINK_LAYER_ETHERNET);
    0
}

unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    out: *mut ibv_gid_entry,
    room: usize,
    _: u32,
    size: usize,
) -> isize {
    assert!(room >= 2 && size == size_of::<ibv_gid_entry>());
    let device = device_of(context);
    let [a, b, c, d] = with(|network| network.devices[device].address);
    let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, a, b, 0xff, 0xfe, c, d, 1];
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d];
    // SAFETY: `from_raw_parts_mut` asks for so many entries that nobody else uses: the caller's.
    let out = unsafe { slice::from_raw_parts_mut(out, 2) };
    for (index, (raw, kind)) in
        (0..).zip([(link_local, IBV_GID_TYPE_ROCE_V1), (mapped, IBV_GID_TYPE_ROCE_V2)])
    {
        let gid = ibv_gid { raw };
        out[index as usize] =
            ibv_gid_entry { gid, gid_index: index, port_num: 1, gid_type: kind, ndev_ifindex: 0 };
    }
    2
}

unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let device = device_of(context);
    with(|network| network.count(device, "domains", true));
    make(|pd: &mut ibv_pd| pd.context = context)
}

unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let device = device_of(at(pd).context);
    if let Some(errno) = with(|network| network.refuses_to_end(device)) {
        return errno;
    }
    with(|network| {
        assert!(network.pairs.values().all(|pair| pair.pd != pd as usize), "a domain in use");
        assert!(network.regions.values().all(|region| region.pd != pd as usize), "a domain in use");
        network.count(device, "domains", false);
    });
    end(pd);
    0
}

unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    memory: *mut c_void,
    len: usize,
    known_as: u64,
    access: c_uint,
) -> *mut ibv_mr {
    let device = device_of(at(pd).context);
    let key = with(|network| {
        if !network.may_register(device, len) {
            return None;
        }
        network.count(device, "registrations", true);
        network.next_key += 0x101;
        let peers = access.cast_signed() & IBV_ACCESS_REMOTE_WRITE != 0;
        let (memory, len) = (memory as u64, len as u64);
        let region = Region { device, pd: pd as usize, memory, known_as, len, peers };
        network.regions.insert(network.next_key, region);
        Some(network.next_key)
    });
    let Some(key) = key else {
        set_errno(libc::ENOMEM);
        return ptr::null_mut();
    };
    make(|mr: &mut ibv_mr| (mr.context, mr.pd, mr.lkey, mr.rkey) = (at(pd).context, pd, key, key))
}

unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let device = device_of(at(mr).context);
    if let Some(errno) = with(|network| network.refuses_to_end(device)) {
        return errno;
    }
    with(|network| {
        assert!(network.regions.remove(&at(mr).lkey).is_some());
        network.count(device, "registrations", false);
    });
    end(mr);
    0
}

unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: `eventfd` asks for nothing.
    let fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
    make(|channel: &mut ibv_comp_channel| (channel.context, channel.fd) = (context, fd))
}

unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let device = device_of(at(channel).context);
    if with(|network| network.queues.values().any(|queue| queue.channel == channel as usize)) {
        assert!(with(|network| network.refuses_to_end(device)).is_some(), "a channel in use");
        // Its queue could not be destroyed, and knows its address: nobody else must get that.
        return libc::EBUSY;
    }
    // SAFETY: `close` asks for a descriptor that is ours: `ibv_create_comp_channel` opened it.
    unsafe { libc::close(at(channel).fd) };
    end(channel);
    0
}

unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let cq = make(|cq: &mut ibv_cq| (cq.context, cq.channel, cq.cqe) = (context, channel, entries));
    let (most, wakeup) = (usize::try_from(entries).expect("a count"), at(channel).fd);
    let device = device_of(context);
    with(|network| {
        network.count(device, "queues", true);
        let (channel, armed) = (channel as usize, false);
        let queue = Queue { entries: Default::default(), most, armed, channel, wakeup };
        network.queues.insert(cq as usize, queue);
    });
    cq
}

unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let device = device_of(at(cq).context);
    if let Some(errno) = with(|network| network.refuses_to_end(device)) {
        return errno;
    }
    with(|network| {
        assert!(network.pairs.values().all(|pair| pair.queue != cq as usize), "a queue in use");
        network.queues.remove(&(cq as usize));
        network.count(device, "queues", false);
    });
    end(cq);
    0
}

unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    if !take_one(at(channel).fd) {
        return -1;
    }
    let any = with(|network| {
        let mut queues = network.queues.iter();
        let found = queues.find(|(_, queue)| queue.channel == channel as usize);
        *found.expect("a queue has signalled").0
    });
    *at(queue) = any as *mut ibv_cq;
    0
}

unsafe extern "C" fn ibv_ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, out: *mut ibv_wc) -> c_int {
    let room = usize::try_from(room).expect("a count");
    // SAFETY: `from_raw_parts_mut` asks for so many entries that nobody else uses: the caller's.
    let out = unsafe { slice::from_raw_parts_mut(out, room) };
    let device = device_of(at(cq).context);
    with(|network| {
        if network.suffers(device, Trouble::CannotBePolled) {
            return -1;
        }
        let entries = &mut network.queues.get_mut(&(cq as usize)).expect("it exists").entries;
        let count = room.min(entries.len());
        out.iter_mut().zip(entries.drain(..count)).for_each(|(to, from)| *to = from);
        c_int::try_from(count).expect("few")
    })
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    with(|network| network.queues.get_mut(&(cq as usize)).expect("it exists").armed = true);
    0
}

unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let (context, init) = (at(pd).context, at(init));
    assert!(init.send_cq == init.recv_cq && init.qp_type == IBV_QPT_RC && init.sq_sig_all == 0);
    let device = device_of(context);
    let refusal = with(|network| {
        if network.suffers(device, Trouble::Gone) {
            return Some(libc::EIO);
        }
        (init.cap.max_inline_data > network.devices[device].inline_max).then_some(libc::EINVAL)
    });
    if let Some(errno) = refusal {
        set_errno(errno);
        return ptr::null_mut();
    }
    let number = with(|network| {
        network.count(device, "queue pairs", true);
        network.next_key += 1;
        let most = [init.cap.max_send_wr, init.cap.max_recv_wr].map(|count| count as usize);
        let pair = Pair {
            device,
            pd: pd as usize,
            queue: init.send_cq as usize,
            state: 0,
            peer: 0,
            sends: Default::default(),
            receives: Default::default(),
            most,
            inline: init.cap.max_inline_data,
            silence: 0,
        };
        network.pairs.insert(network.next_key & 0x00ff_ffff, pair);
        network.next_key & 0x00ff_ffff
    });
    make(|qp: &mut ibv_qp| (qp.context, qp.pd, qp.qp_num) = (context, pd, number))
}

unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    wanted: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let wanted = at(wanted);
    assert!(mask & IBV_QP_STATE != 0);
    let device = device_of(at(qp).context);
    let lasts = |network: &mut Network| network.suffers(device, Trouble::ConnectsLast);
    while wanted.qp_state == IBV_QPS_RTR && with(lasts) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    with(|network| {
        if network.suffers(device, Trouble::Gone) {
            return libc::EIO;
        }
        let pair = network.pairs.get_mut(&at(qp).qp_num).expect("it exists");
        let allowed = match wanted.qp_state {
            IBV_QPS_INIT => pair.state == 0 && mask & IBV_QP_ACCESS_FLAGS != 0,
            IBV_QPS_RTR => pair.state == IBV_QPS_INIT && mask & IBV_QP_DEST_QPN != 0,
            IBV_QPS_RTS => pair.state == IBV_QPS_RTR && mask & IBV_QP_SQ_PSN != 0,
            IBV_QPS_ERR => true,
            other => panic!("nobody asks for state {other}"),
        };
        if !allowed {
            return libc::EINVAL;
        }
        if wanted.qp_state == IBV_QPS_RTR {
            pair.peer = wanted.dest_qp_num;
        }
        pair.state = wanted.qp_state;
        0
    })
}

unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let device = device_of(at(qp).context);
    if let Some(errno) = with(|network| network.refuses_to_end(device)) {
        return errno;
    }
    with(|network| {
        // Its entries stay in the completion queue, as those of the soft RNIC of Linux do.
        assert!(network.pairs.remove(&at(qp).qp_num).is_some());
        network.count(device, "queue pairs", false);
    });
    end(qp);
    0
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    rejected: *mut *mut ibv_send_wr,
) -> c_int {
    let device = device_of(at(qp).context);
    with(|network| {
        if network.suffers(device, Trouble::Gone) {
            return 0;
        }
        let denies = network.suffers(device, Trouble::DeniesPosts);
        let pair = network.pairs.get_mut(&at(qp).qp_num).expect("it exists");
        let mut next = first;
        while !next.is_null() {
            let request = at(next);
            let in_state = [IBV_QPS_RTS, IBV_QPS_ERR].contains(&pair.state);
            if !in_state || pair.sends.len() == pair.most[0] {
                *at(rejected) = next;
                return if in_state { libc::ENOMEM } else { libc::EINVAL };
            }
            let piece = *at(request.sg_list);
            let inline = (request.send_flags & IBV_SEND_INLINE != 0).then(|| {
                assert!(piece.length <= pair.inline, "too long for an inline request");
                // SAFETY: `from_raw_parts` asks for bytes that nobody writes during the call: the
                // caller of `ibv_post_send` promises it.
                unsafe { slice::from_raw_parts(piece.addr as *const u8, piece.length as usize) }
                    .to_vec()
            });
            assert!(request.opcode != IBV_WR_SEND || request.send_flags & IBV_SEND_SOLICITED != 0);
            pair.sends.push_back(Send {
                id: request.wr_id,
                opcode: request.opcode,
                signaled: request.send_flags & IBV_SEND_SIGNALED != 0,
                inline,
                piece,
                rkey: request.rkey,
                address: request.remote_addr,
            });
            next = request.next;
        }
        if denies { libc::EIO } else { 0 }
    })
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    rejected: *mut *mut ibv_recv_wr,
) -> c_int {
    let device = device_of(at(qp).context);
    with(|network| {
        if network.suffers(device, Trouble::Gone) {
            return 0;
        }
        let pair = network.pairs.get_mut(&at(qp).qp_num).expect("it exists");
        let mut next = first;
        while !next.is_null() {
            let request = at(next);
            if pair.receives.len() == pair.most[1] {
                *at(rejected) = next;
                return libc::ENOMEM;
            }
            let piece = *at(request.sg_list);
            pair.receives.push_back(Receive { id: request.wr_id, piece });
            next = request.next;
        }
        0
    })
}

unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    if !take_one(at(context).async_fd) {
        return -1;
    }
    let device = device_of(context);
    let next = |network: &mut Network| network.devices[device].events.pop_front();
    let (event_type, port) = with(next).expect("the descriptor counts the events");
    // The library writes a number here only, and leaves the rest of the union as it was.
    at(event).element.port_num = c_int::from(port);
    at(event).event_type = event_type;
    0
}

unsafe extern "C" fn ibv_ack_async_event(_: *mut ibv_async_event) {}

fn set_errno(errno: c_int) {
    // SAFETY: `__errno_location` asks for nothing.
    let place = unsafe { libc::__errno_location() };
    *at(place) = errno;
}

/// Takes one from an eventfd that does not block; false if it is zero.
fn take_one(eventfd: c_int) -> bool {
    let mut count = 0_u64;
    // SAFETY: `read` asks for an open descriptor and for room: a live local of eight bytes.
    let read = unsafe { libc::read(eventfd, (&raw mut count).cast(), 8) };
    read == 8
}
