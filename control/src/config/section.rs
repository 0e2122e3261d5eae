//! One table of the file, read key by key, so that every complaint names its key and its line.
//!
//! Why not `serde`: its errors name the line but not the path of the key, and checks across
//! several keys come after the spans are gone. Here a value keeps its place in the file as long as
//! somebody may still find fault with it.

use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::schema::{Learned, Shape};

/// The text of the file and its name, which turn a byte offset into `FILE:LINE`; and what is known
/// beside it.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    /// Addresses of the host that it is for, as far as they are known.
    pub(super) here: &'a [IpAddr],
    /// Who learns what the reader asks for, if somebody does.
    pub(super) learned: Option<&'a Learned>,
}

impl Source<'_> {
    /// The complaint about `key`, whose value stands at `span`.
    pub(super) fn error(
        &self,
        span: &Range<usize>,
        key: &str,
        why: impl Into<String>,
    ) -> ConfigError {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        ConfigError::new(self.name, Some(line), key, why)
    }
}

/// A value and its place: line for complaints, path as in `listener.to-b.bind`.
#[derive(Clone)]
pub(super) struct Placed<T> {
    pub(super) value: T,
    pub(super) path: String,
    pub(super) span: Range<usize>,
}

impl<T> Placed<T> {
    /// The complaint that this value is wrong.
    pub(super) fn error(&self, source: Source<'_>, why: impl Into<String>) -> ConfigError {
        source.error(&self.span, &self.path, why)
    }
}

/// A table whose keys are taken out one by one. What is left at `finish` is unknown.
pub(super) struct Section<'a> {
    source: Source<'a>,
    path: String,
    /// The keys of the tables that it is in, and its own.
    place: Vec<&'static str>,
    span: Range<usize>,
    table: DeTable<'a>,
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    /// The whole file.
    ///
    /// # Errors
    ///
    /// If the text is not TOML.
    pub(super) fn parse(source: Source<'a>) -> Result<Self, ConfigError> {
        let table = DeTable::parse(source.text).map_err(|error| {
            let why = error.message().replace('\n', ", ");
            source.error(&error.span().unwrap_or_default(), "", format!("not TOML: {why}"))
        })?;
        let span = table.span();
        let (path, table) = (String::new(), table.into_inner());
        Ok(Self { source, path, place: Vec::new(), span, table, known: Vec::new() })
    }

    /// What complaints about this table's keys begin with.
    pub(super) fn rename(&mut self, path: String) {
        self.path = path;
    }

    /// A complaint about the table as a whole.
    pub(super) fn error(&self, key: &str, why: impl Into<String>) -> ConfigError {
        self.source.error(&self.span, &self.join(key), why)
    }

    /// The table `key`, empty if the file has none.
    pub(super) fn table(&mut self, key: &'static str) -> Result<Self, ConfigError> {
        let source = self.source;
        let place = self.place_of(key);
        let Some(placed) = self.take(key, Shape::Table) else {
            let (path, table) = (self.join(key), DeTable::new());
            return Ok(Self { source, path, place, span: 0..0, table, known: Vec::new() });
        };
        let DeValue::Table(table) = placed.value else {
            return Err(wrong_type(source, &placed.path, &placed.span, &placed.value, "a table"));
        };
        let (path, span) = (placed.path, placed.span);
        Ok(Self { source, path, place, span, table, known: Vec::new() })
    }

    /// The tables of the array `key`, in the order of the file.
    pub(super) fn tables(&mut self, key: &'static str) -> Result<Vec<Self>, ConfigError> {
        let source = self.source;
        let path = self.join(key);
        let mut sections = Vec::new();
        for placed in self.array(key, Shape::Tables, &format!("written as [[{key}]]"))? {
            let DeValue::Table(table) = placed.value else {
                return Err(wrong_type(source, &path, &placed.span, &placed.value, "a table"));
            };
            let (path, place, span) = (path.clone(), self.place_of(key), placed.span);
            sections.push(Self { source, path, place, span, table, known: Vec::new() });
        }
        Ok(sections)
    }

    /// The text at `key`, if it is there.
    pub(super) fn text(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Placed<String>>, ConfigError> {
        self.take_text(key, Shape::Text)
    }

    /// The text at `key`, which must be there and not be empty.
    pub(super) fn required(&mut self, key: &'static str) -> Result<Placed<String>, ConfigError> {
        match self.take_text(key, Shape::RequiredText)? {
            Some(text) if text.value.is_empty() => Err(text.error(self.source, "is empty")),
            Some(text) => Ok(text),
            None => Err(self.error(key, "is missing; every entry of this kind needs it")),
        }
    }

    /// The texts at `key`, a text or an array of texts of which there is at least one.
    pub(super) fn required_texts(
        &mut self,
        key: &'static str,
    ) -> Result<Vec<Placed<String>>, ConfigError> {
        if !self.table.get(key).is_some_and(|value| value.get_ref().is_array()) {
            let one = self.required(key);
            self.learn(key, Shape::RequiredTexts);
            return Ok(vec![one?]);
        }
        let texts = self.texts(key)?;
        self.learn(key, Shape::RequiredTexts);
        if texts.is_empty() {
            return Err(self.error(key, "is empty; list at least one"));
        }
        Ok(texts)
    }

    /// The whole number at `key`, which must lie in `range`; `default` if it is not there.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        range: Range<u64>,
        default: u64,
    ) -> Result<Placed<u64>, ConfigError> {
        let Some(placed) = self.take(key, Shape::Number(range.clone())) else {
            return Ok(Placed { value: default, path: self.join(key), span: self.span.clone() });
        };
        number_of(self.source, placed, &range)
    }

    /// As `number`, for counts that fit in 32 bits: `range` ends there.
    pub(super) fn count(
        &mut self,
        key: &'static str,
        range: Range<u32>,
        default: u32,
    ) -> Result<u32, ConfigError> {
        let range = u64::from(range.start)..u64::from(range.end);
        let placed = self.number(key, range, u64::from(default))?;
        Ok(u32::try_from(placed.value).expect("the range ends within 32 bits"))
    }

    /// `true` or `false` at `key`.
    pub(super) fn boolean(
        &mut self,
        key: &'static str,
        default: bool,
    ) -> Result<bool, ConfigError> {
        let Some(placed) = self.take(key, Shape::Boolean) else { return Ok(default) };
        placed.value.as_bool().ok_or_else(|| {
            wrong_type(self.source, &placed.path, &placed.span, &placed.value, "true or false")
        })
    }

    /// A number from 0 to 1 at `key`, in millionths.
    pub(super) fn millionths(
        &mut self,
        key: &'static str,
        default: u32,
    ) -> Result<u32, ConfigError> {
        let Some(placed) = self.take(key, Shape::Share) else { return Ok(default) };
        let float = placed.value.as_float().map(|float| float.as_str());
        let whole = placed.value.as_integer().map(|integer| integer.as_str());
        let text = float.or(whole).ok_or_else(|| {
            let wanted = "a number from 0 to 1";
            wrong_type(self.source, &placed.path, &placed.span, &placed.value, wanted)
        })?;
        let millionths = text.parse::<f64>().ok().map(|value| value * 1e6);
        let fits = |value: &f64| (0.0..=1e6).contains(value) && (*value == 0.0 || *value >= 1.0);
        match millionths.filter(fits) {
            #[expect(clippy::cast_possible_truncation, reason = "it is at most a million")]
            #[expect(clippy::cast_sign_loss, reason = "it is at least 0")]
            Some(value) => Ok(value.round() as u32),
            None => {
                let why = format!("{text} is out of range; write 0, or 0.000001 to 1");
                Err(self.source.error(&placed.span, &placed.path, why))
            }
        }
    }

    /// A duration such as `"250ms"` at `key`.
    pub(super) fn duration(
        &mut self,
        key: &'static str,
        default: Duration,
    ) -> Result<Duration, ConfigError> {
        self.duration_from(key, (Duration::ZERO, ""), default)
    }

    /// A duration at `key` of at least `least`; if it is shorter, what that would do.
    pub(super) fn duration_from(
        &mut self,
        key: &'static str,
        (least, would): (Duration, &str),
        default: Duration,
    ) -> Result<Duration, ConfigError> {
        let source = self.source;
        let Some(placed) = self.take(key, Shape::Duration) else { return Ok(default) };
        if let Some(number) = placed.value.as_integer() {
            let why = format!("{number} {}", super::duration::without_unit(number.as_str()));
            return Err(source.error(&placed.span, &placed.path, why));
        }
        let text = text_of(source, placed)?;
        let time = super::duration::parse(&text.value).map_err(|why| text.error(source, why))?;
        if time < least {
            let [least, default] = [least, default].map(super::shown::duration);
            let why = format!("less than {least} would {would}; write \"{default}\"");
            return Err(text.error(source, why));
        }
        Ok(time)
    }

    /// One of a few words at `key`.
    pub(super) fn word<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&str, T)],
        default: T,
    ) -> Result<T, ConfigError> {
        Ok(self.optional_word(key, words)?.unwrap_or(default))
    }

    /// One of a few words at `key`, if there is one.
    pub(super) fn optional_word<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let source = self.source;
        let shape = Shape::Word(words.iter().map(|(word, _)| (*word).to_owned()).collect());
        let Some(text) = self.take_text(key, shape)? else { return Ok(None) };
        match words.iter().find(|(word, _)| *word == text.value) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let all: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
                let why = format!("\"{}\" is not known; write {}", text.value, all.join(" or "));
                Err(text.error(source, why))
            }
        }
    }

    /// Whether the file has `key`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// The texts of the array at `key`; none if it is not there.
    pub(super) fn texts(&mut self, key: &'static str) -> Result<Vec<Placed<String>>, ConfigError> {
        let source = self.source;
        let values = self.array(key, Shape::Texts, "written as [\"…\", \"…\"]")?;
        values.into_iter().map(|placed| text_of(source, placed)).collect()
    }

    /// The whole numbers of the array at `key`, each in `range`; none if it is not there.
    pub(super) fn numbers(
        &mut self,
        key: &'static str,
        range: &Range<u64>,
    ) -> Result<Vec<Placed<u64>>, ConfigError> {
        let source = self.source;
        let values = self.array(key, Shape::Numbers(range.clone()), "written as [0, 1]")?;
        values.into_iter().map(|placed| number_of(source, placed, range)).collect()
    }

    /// The ports of the array at `key`, numbers or ranges such as "8000-8099"; none if it is not
    /// there.
    pub(super) fn port_ranges(
        &mut self,
        key: &'static str,
    ) -> Result<Vec<Placed<RangeInclusive<u16>>>, ConfigError> {
        let source = self.source;
        let values = self.array(key, Shape::Ports, "written as [7010, \"8000-8099\"]")?;
        values.into_iter().map(|placed| port_range_of(source, placed)).collect()
    }

    /// Complains about the first key that nobody asked for.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        let first = self.table.iter().min_by_key(|(key, _)| key.span().start);
        let Some((key, _)) = first else { return Ok(()) };
        let why = format!("is not a key; known here: {}", self.known.join(", "));
        Err(self.source.error(&key.span(), &self.join(key.get_ref()), why))
    }

    fn array(
        &mut self,
        key: &'static str,
        shape: Shape,
        how: &str,
    ) -> Result<Vec<Placed<DeValue<'a>>>, ConfigError> {
        let source = self.source;
        let Some(placed) = self.take(key, shape) else { return Ok(Vec::new()) };
        let DeValue::Array(array) = placed.value else {
            let wanted = format!("a list, {how}");
            return Err(wrong_type(source, &placed.path, &placed.span, &placed.value, &wanted));
        };
        let place = |value: Spanned<DeValue<'a>>| Placed {
            path: placed.path.clone(),
            span: value.span(),
            value: value.into_inner(),
        };
        Ok(array.into_iter().map(place).collect())
    }

    fn take_text(
        &mut self,
        key: &'static str,
        shape: Shape,
    ) -> Result<Option<Placed<String>>, ConfigError> {
        let Some(placed) = self.take(key, shape) else { return Ok(None) };
        text_of(self.source, placed).map(Some)
    }

    fn learn(&self, key: &'static str, shape: Shape) {
        if let Some(learned) = self.source.learned {
            learned.note(&self.place, key, shape);
        }
    }

    fn place_of(&self, key: &'static str) -> Vec<&'static str> {
        let mut place = self.place.clone();
        place.push(key);
        place
    }

    /// Takes out what is at `key`, and says what it should be.
    fn take(&mut self, key: &'static str, shape: Shape) -> Option<Placed<DeValue<'a>>> {
        self.learn(key, shape);
        self.known.push(key);
        let value = self.table.remove(key)?;
        let span = value.span();
        Some(Placed { value: value.into_inner(), path: self.join(key), span })
    }

    fn join(&self, key: &str) -> String {
        match (self.path.is_empty(), key.is_empty()) {
            (true, _) => key.to_owned(),
            (false, true) => self.path.clone(),
            (false, false) => format!("{}.{key}", self.path),
        }
    }
}

fn text_of(source: Source<'_>, placed: Placed<DeValue<'_>>) -> Result<Placed<String>, ConfigError> {
    match placed.value.as_str() {
        Some(text) => {
            Ok(Placed { value: text.to_owned(), path: placed.path.clone(), span: placed.span })
        }
        None => {
            Err(wrong_type(source, &placed.path, &placed.span, &placed.value, "text in quotes"))
        }
    }
}

fn number_of(
    source: Source<'_>,
    placed: Placed<DeValue<'_>>,
    range: &Range<u64>,
) -> Result<Placed<u64>, ConfigError> {
    let Some(integer) = placed.value.as_integer() else {
        let wanted = "a whole number without quotes";
        return Err(wrong_type(source, &placed.path, &placed.span, &placed.value, wanted));
    };
    match u64::from_str_radix(integer.as_str(), integer.radix()) {
        Ok(value) if range.contains(&value) => {
            Ok(Placed { value, path: placed.path, span: placed.span })
        }
        Ok(_) | Err(_) => {
            let last = range.end - 1;
            let why = format!("{integer} is out of range; write {} to {last}", range.start);
            Err(source.error(&placed.span, &placed.path, why))
        }
    }
}

fn port_range_of(
    source: Source<'_>,
    placed: Placed<DeValue<'_>>,
) -> Result<Placed<RangeInclusive<u16>>, ConfigError> {
    let (path, span) = (placed.path.clone(), placed.span.clone());
    let value = match placed.value.as_str() {
        None => {
            let port = number_of(source, placed, &(1..65_536))?.value;
            let port = u16::try_from(port).expect("its range was checked");
            port..=port
        }
        Some(text) => {
            let ports = text.split_once('-').and_then(|(first, last)| {
                let [first, last] = [first, last].map(|port| port.trim().parse::<u16>().ok());
                Some(first?..=last?)
            });
            let ports = ports.filter(|ports| *ports.start() > 0 && !ports.is_empty());
            ports.ok_or_else(|| {
                let why = format!("\"{text}\" is no range of ports; write one as \"8000-8099\"");
                source.error(&span, &path, why)
            })?
        }
    };
    Ok(Placed { value, path, span })
}

fn wrong_type(
    source: Source<'_>,
    path: &str,
    span: &Range<usize>,
    found: &DeValue<'_>,
    wanted: &str,
) -> ConfigError {
    source.error(span, path, format!("is of type {}; write {wanted}", found.type_str()))
}
