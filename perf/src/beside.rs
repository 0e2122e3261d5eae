//! Busy loops that run beside a measurement, as another program on the same machine would.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;

/// How many busy loops run beside a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Beside {
    pub(crate) loops: u32,
    /// Their nice value.
    pub(crate) nice: i32,
}

/// Keeps a core busy until the process is killed.
pub(crate) fn burn() -> ! {
    let mut sum = 0_u64;
    loop {
        sum = black_box(sum.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.loops {
            0 => f.write_str("alone"),
            loops => write!(f, "{loops}@{}", self.nice),
        }
    }
}

impl FromStr for Beside {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "alone" {
            return Ok(Self::default());
        }
        let parse = || {
            let (loops, nice) = text.split_once('@')?;
            let loops = loops.parse().ok().filter(|loops| (1..=64).contains(loops))?;
            let nice = nice.parse().ok().filter(|nice| (-20..=19).contains(nice))?;
            Some(Self { loops, nice })
        };
        parse().ok_or_else(|| format!("{text:?}: alone, or LOOPS@NICE, for example 2@5"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name in a record, given to `--beside`, must repeat that measurement.
    #[test]
    fn names_parse_back_to_the_same_value() {
        for name in ["alone", "1@0", "2@5", "3@-5"] {
            assert_eq!(name.parse::<Beside>().unwrap().to_string(), name);
        }
        for wrong in ["", "0@5", "2", "2@", "@5", "2@20", "65@0", "none"] {
            assert!(wrong.parse::<Beside>().is_err(), "{wrong}");
        }
    }
}
