//! Every offset, size and constant, compared with the installed headers of libibverbs.
//!
//! A C program prints what the compiler makes of the headers. Needs libibverbs-dev, which
//! `scripts/setup tests` installs.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::fs;
use std::mem::{offset_of, size_of};
use std::process::Command;

use rdma_core_sys::*;

/// An expression in C, and what we believe that it is.
type Belief = (String, u64);

/// Size and offsets of a structure, whose fields have the same names in C.
macro_rules! structure {
    ($beliefs:ident, $name:ident, $($field:ident)*) => {
        $beliefs.push((format!("sizeof(struct {})", stringify!($name)), size_of::<$name>() as u64));
        $($beliefs.push((
            format!("offsetof(struct {}, {})", stringify!($name), stringify!($field)),
            offset_of!($name, $field) as u64,
        ));)*
    };
}

/// Offsets of fields, which other structures or unions contain in C.
macro_rules! inner {
    ($beliefs:ident, $name:ident, $($field:literal = $ours:expr;)*) => {
        $($beliefs.push((
            format!("offsetof(struct {}, {})", stringify!($name), $field),
            $ours as u64,
        ));)*
    };
}

macro_rules! constants {
    ($beliefs:ident, $($name:ident)*) => {
        $($beliefs.push((stringify!($name).into(), u64::try_from($name).unwrap()));)*
    };
}

fn beliefs() -> Vec<Belief> {
    let mut all = Vec::new();
    structure!(all, ibv_context, device ops cmd_fd async_fd num_comp_vectors);
    structure!(all, ibv_mr, context pd addr length lkey rkey);
    structure!(all, ibv_comp_channel, context fd);
    structure!(all, ibv_cq, context channel cq_context cqe);
    structure!(all, ibv_qp, context qp_context pd send_cq recv_cq srq qp_num);
    structure!(all, ibv_pd, context handle);
    structure!(all, ibv_device_attr, max_qp max_qp_wr max_sge max_cq max_cqe max_mr max_pd);
    structure!(all, ibv_port_attr, state max_mtu active_mtu gid_tbl_len link_layer);
    structure!(all, ibv_gid_entry, gid gid_index port_num gid_type ndev_ifindex);
    structure!(all, ibv_sge, addr length lkey);
    structure!(all, ibv_recv_wr, wr_id next sg_list num_sge);
    structure!(all, ibv_send_wr, wr_id next sg_list num_sge opcode send_flags imm_data);
    structure!(all, ibv_wc, wr_id status opcode vendor_err byte_len qp_num src_qp wc_flags);
    structure!(all, ibv_qp_cap, max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data);
    structure!(all, ibv_qp_init_attr, qp_context send_cq recv_cq srq cap qp_type sq_sig_all);
    structure!(all, ibv_global_route, dgid flow_label sgid_index hop_limit traffic_class);
    structure!(all, ibv_ah_attr, grh is_global port_num);
    structure!(all, ibv_qp_attr, qp_state path_mtu rq_psn sq_psn dest_qp_num qp_access_flags cap
        ah_attr alt_ah_attr pkey_index max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num
        timeout retry_cnt rnr_retry);
    structure!(all, ibv_async_event, event_type);
    inner!(all, ibv_device,
        "name" = offset_of!(ibv_device, name);
        "dev_name" = offset_of!(ibv_device, dev_name););
    inner!(all, ibv_context,
        "ops.poll_cq" = offset_of!(ibv_context, ops.poll_cq);
        "ops.req_notify_cq" = offset_of!(ibv_context, ops.req_notify_cq);
        "ops.post_send" = offset_of!(ibv_context, ops.post_send);
        "ops.post_recv" = offset_of!(ibv_context, ops.post_recv););
    inner!(all, ibv_send_wr,
        "wr.rdma.remote_addr" = offset_of!(ibv_send_wr, remote_addr);
        "wr.rdma.rkey" = offset_of!(ibv_send_wr, rkey););
    inner!(all, ibv_async_event, "element.port_num" = offset_of!(ibv_async_event, element););
    constants!(all, IBV_PORT_ACTIVE IBV_LINK_LAYER_ETHERNET IBV_GID_TYPE_ROCE_V1
        IBV_GID_TYPE_ROCE_V2 IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_QPT_RC IBV_QPS_INIT
        IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_ERR IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX
        IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY
        IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN IBV_WR_RDMA_WRITE IBV_WR_SEND IBV_SEND_SIGNALED
        IBV_SEND_SOLICITED IBV_SEND_INLINE IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR
        IBV_WC_LOC_PROT_ERR IBV_WC_WR_FLUSH_ERR IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR
        IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR IBV_EVENT_DEVICE_FATAL
        IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR IBV_EVENT_GID_CHANGE);
    all
}

/// A wrong offset would make the NIC read a length as an address. It must fail here.
#[test]
fn layouts_are_those_of_the_installed_headers() {
    let beliefs = beliefs();
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let headers = ["stddef.h", "stdio.h", "infiniband/verbs.h"];
    let mut text: String = headers.iter().map(|name| format!("#include <{name}>\n")).collect();
    text += "int main(void) {\n";
    for (expression, _) in &beliefs {
        text += &format!("printf(\"%llu\\n\", (unsigned long long)({expression}));\n");
    }
    fs::write(&source, text + "return 0;\n}\n").unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&source).status().unwrap();
    assert!(compiled.success(), "no headers of libibverbs? scripts/setup tests installs them");
    let printed = Command::new(&program).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let theirs: Vec<u64> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(theirs.len(), beliefs.len());
    let wrong = beliefs.iter().zip(theirs).filter(|((_, ours), theirs)| ours != theirs);
    let wrong: Vec<_> =
        wrong.map(|((what, ours), theirs)| format!("{what}: {theirs}, we: {ours}")).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The library that the test machine has is one that we can use.
#[test]
fn the_installed_library_has_every_function() {
    // SAFETY: this is the name of libibverbs, and of nothing else.
    let library = unsafe { Library::open(c"libibverbs.so.1") };
    assert!(library.is_ok(), "{library:?}");
}
