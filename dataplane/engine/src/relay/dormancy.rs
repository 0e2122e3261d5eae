//! When a connection is dormant: nothing has come for so long that its element should give memory
//! back.

/// How long nothing has come, as often as somebody looks.
#[derive(Debug, Default)]
pub(super) struct Dormancy {
    /// How much had come at the last look.
    bytes: u64,
    /// Looks since then at which it was no more, or since it was last called dormant.
    looks: u8,
}

impl Dormancy {
    /// Takes a look: so many bytes have come in all. Returns whether nothing has come for
    /// [`LOOKS`] looks; again after as many, for what cannot be given back now may be then.
    pub(super) fn look(&mut self, bytes: u64) -> bool {
        let came = std::mem::replace(&mut self.bytes, bytes) != bytes;
        self.looks = if came { 0 } else { self.looks + 1 };
        let is_dormant = self.looks == LOOKS;
        if is_dormant {
            self.looks = 0;
        }
        is_dormant
    }
}

/// The sweep looks four times a second: five seconds. To give a page back and to get another one
/// costs some microseconds. Nine thousand connections that are never dormant for longer than that
/// take less than a hundredth of a core with it.
const LOOKS: u8 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_dormant_is_called_so_now_and_then() {
        let mut dormancy = Dormancy::default();
        let told: Vec<_> = (1..=50).filter(|_| dormancy.look(0)).collect();
        assert_eq!(told, [20, 40], "nothing has come yet");
        for bytes in 1..5 {
            let told: Vec<_> = (0..20).filter(|_| dormancy.look(bytes)).collect();
            assert_eq!(told, [0; 0], "not for long enough, {bytes} times");
        }
        let told: Vec<_> = (1..=50).filter(|_| dormancy.look(4)).collect();
        assert_eq!(told, [1, 21, 41]);
    }
}
