//! The table: what a client and a server do, and which program depends on it.

use super::tape::Tape;

/// One row of the table.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) client: fn(&mut Tape),
    /// None: nobody listens.
    pub(super) server: Option<fn(&mut Tape)>,
}

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

pub(super) const SCENARIOS: &[Scenario] = &[
    // `ssh host command < file`: the answer comes after the end of the question.
    Scenario {
        name: "client half-closes",
        client: |tape| {
            tape.write(1, 300 * KIB);
            tape.finish();
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.read_to_end();
            tape.write(2, 700 * KIB);
        }),
    },
    // A server that has sent everything, and still reads.
    Scenario {
        name: "server half-closes",
        client: |tape| {
            tape.read_to_end();
            tape.write(3, 700 * KIB);
        },
        server: Some(|tape| {
            tape.write(4, 300 * KIB);
            tape.finish();
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "both half-close at once",
        client: finish_at_once,
        server: Some(finish_at_once),
    },
    // A port scanner, a health check.
    Scenario {
        name: "client closes at once",
        client: Tape::close,
        server: Some(Tape::read_to_end),
    },
    Scenario {
        name: "server closes at once",
        client: Tape::read_to_end,
        server: Some(Tape::close),
    },
    // A crash must look like one: a FIN here would make a truncated file look complete.
    Scenario { name: "client resets", client: greet_and_reset, server: Some(greet_and_see) },
    Scenario { name: "server resets", client: greet_and_see, server: Some(greet_and_reset) },
    // The reset must not wait for room that a sleeping reader will never make.
    Scenario {
        name: "client resets behind bytes that nobody reads",
        client: hold_back_and_reset,
        server: Some(Tape::await_break),
    },
    Scenario {
        name: "server resets behind bytes that nobody reads",
        client: Tape::await_break,
        server: Some(hold_back_and_reset),
    },
    // Nor may it come as an end, whatever still waits for whoever has crashed.
    Scenario {
        name: "client resets although bytes wait for it",
        client: reset_when_told,
        server: Some(hold_back_and_read),
    },
    Scenario {
        name: "server resets although bytes wait for it",
        client: hold_back_and_read,
        server: Some(reset_when_told),
    },
    Scenario {
        name: "server resets after the client half-closed",
        client: |tape| {
            tape.write(5, 10);
            tape.finish();
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.read_to_end();
            tape.reset();
        }),
    },
    // Closing with unread data is a reset, also through a gateway.
    Scenario {
        name: "client closes with unread data",
        client: |tape| {
            tape.listen();
            tape.sleep_ms(1_000); // Until the data is in our socket, on every route.
            tape.read(10);
            tape.close();
        },
        server: Some(|tape| {
            tape.write(6, 100 * KIB);
            tape.tell();
            tape.read_to_end();
        }),
    },
    // A browser that is closed in the middle of a download.
    Scenario {
        name: "client leaves in the middle of a stream",
        client: |tape| {
            tape.read(100_000);
            tape.close();
        },
        server: Some(Tape::write_until_broken),
    },
    Scenario {
        name: "server leaves in the middle of a stream",
        client: Tape::write_until_broken,
        server: Some(|tape| {
            tape.read(100_000);
            tape.close();
        }),
    },
    Scenario {
        name: "server writes to a client that closed",
        client: Tape::close,
        server: Some(|tape| {
            tape.read_to_end();
            tape.write_until_broken();
        }),
    },
    // A reader that does not read must stop the writer, not fill a gateway's memory.
    Scenario {
        name: "server sleeps before reading",
        client: |tape| {
            tape.write_unread(7, 96 << 20);
            tape.finish();
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.listen();
            tape.sleep_ms(500);
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "client sleeps before reading",
        client: |tape| {
            tape.listen();
            tape.sleep_ms(500);
            tape.read_to_end();
        },
        server: Some(|tape| tape.write_unread(8, 96 << 20)),
    },
    Scenario {
        name: "writes of 1 byte to 1 MiB",
        client: |tape| {
            let sizes = (0..=20).flat_map(|power| {
                let size = 1_usize << power;
                [size, size + 1, size.saturating_sub(1).max(1)]
            });
            tape.write_pieces(9, sizes);
            tape.finish();
            tape.read_to_end();
        },
        server: Some(Tape::read_to_end),
    },
    Scenario {
        name: "many small writes in both directions",
        client: many_small_writes,
        server: Some(many_small_writes),
    },
    // SMTP, MySQL, SSH: the client is silent until it is greeted.
    Scenario {
        name: "server speaks first",
        client: |tape| {
            tape.read(40);
            tape.write(10, 20);
            tape.read(400);
            tape.close();
        },
        server: Some(|tape| {
            tape.write(11, 40);
            tape.read(20);
            tape.write(12, 400);
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "somebody types",
        client: |tape| {
            tape.type_and_see(300);
            tape.finish();
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.echo(1, 300);
            tape.read_to_end();
        }),
    },
    // Silence that is longer than any timer of the rendezvous.
    Scenario {
        name: "silence, then an answer",
        client: |tape| {
            tape.write(13, 100);
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.read(100);
            tape.sleep_ms(3_000);
            tape.write(14, MIB);
        }),
    },
    Scenario { name: "nobody listens", client: Tape::see_refusal, server: None },
    // An application that stops reading must not disturb its peer.
    Scenario {
        name: "client shuts down for reading",
        client: |tape| {
            tape.stop_reading();
            tape.write(34, 1_000);
            tape.listen();
            tape.write(35, 1_000);
            tape.finish();
        },
        server: Some(|tape| {
            tape.read(1_000);
            tape.tell();
            tape.read_to_end();
        }),
    },
    // `telnet`, `rlogin`, `ftp`: an interrupt overtakes what was typed before it.
    Scenario {
        name: "client sends an urgent byte alone",
        client: |tape| {
            tape.write_urgent(b'!');
            tape.finish();
            tape.read_to_end();
        },
        server: Some(|tape| {
            tape.await_urgent();
            tape.read_urgent();
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "client sends an urgent byte in the middle of a stream",
        client: send_urgent_in_the_middle,
        server: Some(find_urgent_in_the_middle),
    },
    Scenario {
        name: "server sends an urgent byte in the middle of a stream",
        client: find_urgent_in_the_middle,
        server: Some(send_urgent_in_the_middle),
    },
    Scenario {
        name: "the reader has urgent bytes in line",
        client: send_urgent_in_the_middle,
        server: Some(|tape| {
            tape.read_urgent_in_line();
            tape.await_urgent();
            tape.read_urgent();
            tape.read_to_mark();
            tape.read(1);
            tape.tell();
            tape.read_to_end();
        }),
    },
    // Programs that know nothing of urgent bytes read past them.
    Scenario {
        name: "the reader ignores an urgent byte",
        client: |tape| {
            tape.write(24, 10_000);
            tape.write_urgent(b'!');
            tape.write(25, 10_000);
            tape.finish();
            tape.tell();
        },
        server: Some(|tape| {
            tape.listen();
            tape.sleep_ms(1_000); // Until all of it is in our socket, on every route.
            tape.read_to_end();
        }),
    },
    // The first one becomes an ordinary byte, because TCP has only one urgent mark.
    Scenario {
        name: "two urgent bytes in a row",
        client: |tape| {
            tape.write(26, 100);
            tape.write_urgent(b'1');
            tape.write_urgent(b'2');
            tape.tell();
            tape.listen();
            tape.write(27, 100);
            tape.finish();
        },
        server: Some(|tape| {
            tape.listen();
            tape.sleep_ms(1_000);
            tape.await_urgent();
            tape.read_urgent();
            tape.read_to_mark();
            tape.tell();
            tape.read_to_end();
        }),
    },
    // If nothing is sent between the two, the first is lost between two kernels, too.
    Scenario {
        name: "a second urgent byte when the first was seen and not read",
        client: |tape| {
            tape.write_urgent(b'1');
            tape.listen();
            tape.write_urgent(b'2');
            tape.write(36, 100);
            tape.finish();
            tape.tell();
        },
        server: Some(|tape| {
            tape.await_urgent();
            tape.tell();
            tape.listen();
            tape.sleep_ms(1_000);
            tape.read_urgent();
            tape.read_to_mark();
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "urgent bytes one after the other",
        client: |tape| {
            for round in 0..20 {
                tape.write(28, 1_000);
                tape.write_urgent(round);
                tape.listen();
            }
            tape.finish();
        },
        server: Some(|tape| {
            for _ in 0..20 {
                tape.await_urgent();
                tape.read_to_mark();
                tape.read_urgent();
                tape.tell();
            }
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "an urgent byte behind more than all buffers hold",
        client: |tape| {
            tape.write_unread(29, 96 << 20);
            tape.write_urgent(b'!');
            tape.write(30, 10);
            tape.finish();
        },
        server: Some(|tape| {
            tape.listen();
            tape.sleep_ms(500);
            tape.read(96 << 20);
            tape.await_urgent();
            tape.read_urgent();
            tape.read_to_mark();
            tape.read_to_end();
        }),
    },
    Scenario {
        name: "client resets after an urgent byte",
        client: |tape| {
            tape.write(31, 1_000);
            tape.write_urgent(b'!');
            tape.listen();
            tape.reset();
        },
        server: Some(|tape| {
            tape.await_urgent();
            tape.read_to_mark();
            tape.read_urgent();
            tape.tell();
            tape.read_to_end();
        }),
    },
];

fn send_urgent_in_the_middle(tape: &mut Tape) {
    tape.write(32, 10_000);
    tape.write_urgent(b'!');
    tape.write(33, 10_000);
    tape.listen();
    tape.finish();
    tape.read_to_end();
}

fn find_urgent_in_the_middle(tape: &mut Tape) {
    tape.await_urgent();
    tape.read_urgent();
    tape.read_to_mark();
    tape.read(10_000);
    tape.tell();
    tape.read_to_end();
}

fn finish_at_once(tape: &mut Tape) {
    tape.write(20, 64 * KIB);
    tape.tell();
    tape.listen();
    tape.finish();
    tape.read_to_end();
}

/// The reset comes after everything before it has been read, because already on TCP it is a matter
/// of chance what a reset does to bytes under way.
fn greet_and_reset(tape: &mut Tape) {
    tape.write(21, 1_000);
    tape.read(1_000);
    tape.listen();
    tape.reset();
}

fn hold_back_and_reset(tape: &mut Tape) {
    tape.write_until_held_back();
    tape.reset();
}

fn hold_back_and_read(tape: &mut Tape) {
    tape.write_until_held_back();
    tape.tell();
    tape.read_to_end();
}

fn reset_when_told(tape: &mut Tape) {
    tape.listen();
    tape.reset();
}

fn greet_and_see(tape: &mut Tape) {
    tape.write(22, 1_000);
    tape.read(1_000);
    tape.tell();
    tape.read_to_end();
}

fn many_small_writes(tape: &mut Tape) {
    tape.write_pieces_and_read(23, std::iter::repeat_n(17, 20_000));
}
