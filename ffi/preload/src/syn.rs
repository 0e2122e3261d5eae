//! Whether a SYN that the kernel has saved offers SMC-R.

/// Looks for TCP option 254 with the name of SMC-R in an IP packet: header, extension headers, TCP
/// header and options.
pub(crate) fn offers_smc(packet: &[u8]) -> bool {
    options(packet).is_some_and(has_option)
}

/// The options of the TCP header in this packet.
fn options(packet: &[u8]) -> Option<&[u8]> {
    let tcp = match packet.first()? >> 4 {
        4 => packet.get(usize::from(packet[0] & 0x0f) * 4..)?,
        6 => behind_extensions(*packet.get(6)?, packet.get(40..)?)?,
        _ => return None,
    };
    let length = usize::from(tcp.get(12)? >> 4) * 4;
    tcp.get(20..length)
}

/// The header of TCP, which may stand behind extension headers of IPv6.
fn behind_extensions(mut protocol: u8, mut packet: &[u8]) -> Option<&[u8]> {
    loop {
        let length = match i32::from(protocol) {
            libc::IPPROTO_TCP => return Some(packet),
            libc::IPPROTO_HOPOPTS | libc::IPPROTO_ROUTING | libc::IPPROTO_DSTOPTS => {
                usize::from(*packet.get(1)?) * 8 + 8
            }
            libc::IPPROTO_FRAGMENT => 8,
            _ => return None,
        };
        protocol = *packet.first()?;
        packet = packet.get(length..)?;
    }
}

fn has_option(mut options: &[u8]) -> bool {
    while let [kind, rest @ ..] = options {
        match (kind, rest) {
            (0, _) => return false,
            (1, rest) => options = rest,
            (254, [6, 0xe2, 0xd4, 0xc3, 0xd9, ..]) => return true,
            (_, [length, ..]) if *length >= 2 => {
                options = options.get(usize::from(*length)..).unwrap_or_default();
            }
            _ => return false,
        }
    }
    false
}

/// The first bytes of every message of the rendezvous: its name in EBCDIC.
pub(crate) const EYE_CATCHER: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];

#[cfg(test)]
mod tests {
    use super::*;

    const SMC: &[u8] = b"\x02\x04\x05\xb4\x01\x01\xfe\x06\xe2\xd4\xc3\xd9";

    fn tcp(options: &[u8]) -> Vec<u8> {
        let mut header = vec![0; 20];
        header[12] = u8::try_from((20 + options.len()) / 4).unwrap() << 4;
        [&header, options].concat()
    }

    fn ipv4(options: &[u8]) -> Vec<u8> {
        let mut header = vec![0; 24];
        header[0] = 0x46;
        [header, tcp(options)].concat()
    }

    fn ipv6(extensions: &[u8], next: u8, options: &[u8]) -> Vec<u8> {
        let mut header = vec![0; 40];
        (header[0], header[6]) = (0x60, next);
        [&header, extensions, &tcp(options)].concat()
    }

    #[test]
    fn the_option_is_found_where_it_may_be() {
        assert!(offers_smc(&ipv4(SMC)));
        assert!(offers_smc(&ipv6(&[], 6, SMC)));
        let hop_by_hop = [[6, 1].as_slice(), &[0; 14]].concat();
        assert!(offers_smc(&ipv6(&hop_by_hop, 0, SMC)));
    }

    #[test]
    fn nothing_else_is_taken_for_it() {
        for options in [
            &b""[..],
            b"\x02\x04\x05\xb4",
            b"\x00\x00\x00\x00\xfe\x06\xe2\xd4\xc3\xd9\x00\x00",
            b"\xfe\x06\xe2\xd4\xc3\xd8\x00\x00",
            b"\xfe\x00\x00\x00",
            b"\x03\xff\x00\x00",
        ] {
            assert!(!offers_smc(&ipv4(options)), "{options:?}");
        }
    }

    #[test]
    fn no_packet_is_too_short_to_look_at() {
        for whole in [ipv4(SMC), ipv6(&[0, 0, 0, 0, 0, 0, 0, 0], 60, SMC), ipv6(&[], 44, SMC)] {
            for length in 0..whole.len() {
                assert!(!offers_smc(&whole[..length]));
            }
        }
    }
}
