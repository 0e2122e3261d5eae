//! The connection between the workers of two NICs about one queue pair.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::doubtful::Doubtful;
use super::wire::{LEN, Message};

/// A connection.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) socket: Doubtful,
    /// By which the worker knows it.
    pub(super) token: u64,
}

/// What came.
#[derive(Debug)]
pub(super) enum Packet {
    /// Nothing.
    None,
    /// A message, and the descriptors that came with it.
    Message(Message, Vec<Doubtful>),
    /// Something that no peer of ours says.
    Nonsense,
    /// The peer has gone.
    End,
}

impl Line {
    /// Says something. A peer that does not listen gets only so much.
    ///
    /// # Errors
    ///
    /// When the peer has gone, or has not listened for long.
    pub(super) fn send(&self, message: &Message, give: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GIVEN_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !give.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(give)), "there is room for one");
        }
        let packet = message.encode();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut control, flags)?;
        Ok(())
    }

    /// Takes what the peer has said.
    pub(super) fn receive(&self) -> Packet {
        // Those for which there is no room the kernel closes while we wait.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // One byte more than a message has: a longer packet must not look like one.
        let mut packet = [0; LEN + 1];
        let mut into = [IoSliceMut::new(&mut packet)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.socket, &mut into, &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Packet::None,
            Err(_) => return Packet::End,
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(given) = message {
                descriptors.extend(given.map(|it| Doubtful::by(&self.socket, it)));
            }
        }
        if received.bytes == 0 && descriptors.is_empty() {
            return Packet::End;
        }
        let whole = !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        match Message::decode(&packet[..received.bytes.min(LEN + 1)]).filter(|_| whole) {
            // To close what nobody has asked for may take long, and would cost no peer anything.
            Some(message) if descriptors.len() <= message.descriptors() => {
                Packet::Message(message, descriptors)
            }
            Some(_) | None => Packet::Nonsense,
        }
    }
}

/// The most descriptors that come with a message.
const GIVEN_MAX: usize = 1;
/// The most that can come with a packet (the kernel's SCM_MAX_FD).
const PACKET_MAX: usize = 253;
