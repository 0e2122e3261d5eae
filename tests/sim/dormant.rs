//! Dormant connections give memory back, and lose nothing by that.

use std::time::Duration;

use crate::application::bytes;
use crate::foreign::Stage;

/// A quarter of a second after the other, for longer than it takes to be dormant.
fn sleep(stage: &mut Stage) {
    for _ in 0..40 {
        stage.now = stage.now + Duration::from_millis(250);
        stage.run();
    }
}

#[test]
fn a_dormant_connection_gives_its_memory_back_and_goes_on() {
    let mut stage = Stage::new();
    for part in 0..3_u64 {
        stage.write(5_000);
        stage.run();
        assert_eq!(stage.application.received(), (part + 1) * 5_000);
        let written = bytes(1, part * 5_000, 5_000);
        assert_eq!(stage.element(part * 5_000, 5_000), written);
        sleep(&mut stage);
        assert_eq!(stage.element(0, 16_384), vec![0; 16_384], "{part}");
    }
}

/// A peer may stop for as long as it likes between a write and the message that announces it: a
/// machine that is moved to another host does. What it has written then belongs to the stream.
#[test]
fn what_was_written_and_not_announced_stays() {
    for placed in [false, true] {
        let mut stage = Stage::new();
        stage.write(100);
        stage.run();
        if placed {
            stage.place_at_once();
        }
        let span = stage.honest.produce(200);
        stage.write_in_silence(200, span);
        stage.run();
        let now = if placed { bytes(1, 100, 200) } else { vec![0; 200] };
        assert_eq!(stage.element(100, 200), now);
        sleep(&mut stage);
        assert_eq!(stage.element(100, 200), now);
        stage.say_what_is_due();
        stage.run();
        assert_eq!(stage.application.received(), 300, "each of them is checked");
        sleep(&mut stage);
        assert_eq!(stage.element(0, 300), [0; 300]);
    }
}

/// Bytes that the program has not read are in the element; it may take hours over them.
#[test]
fn what_was_not_read_stays() {
    let mut stage = Stage::new();
    stage.application.sleep();
    for _ in 0..12 {
        stage.write(4_096);
        stage.run();
    }
    // The socket holds forty thousand, and the element what is behind them.
    let unread = stage.element(40_000 % 16_384, 9_152);
    assert_eq!(unread, bytes(1, 40_000, 9_152));
    sleep(&mut stage);
    assert_eq!(stage.element(40_000 % 16_384, 9_152), unread);
    stage.application.wake();
    stage.run();
    assert_eq!(stage.application.received(), 12 * 4_096, "each of them is checked");
    sleep(&mut stage);
    assert_eq!(stage.element(0, 16_384), [0; 16_384]);
}
