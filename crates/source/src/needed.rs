//! Reads only the needed fields of an object. Other fields of any shape, and nulls, which the API
//! server stores and serves anywhere, leave it readable.

use std::fmt;

use proxy_core::compact::Needed;
use serde::Serialize;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess,
    Visitor,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Misread {
    /// The needed field with the wrong shape, such as `spec.ports[0].port`; empty for the whole
    /// object.
    pub(crate) field: String,
    pub(crate) why: String,
}

impl fmt::Display for Misread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, why } = self;
        if field.is_empty() {
            f.write_str(why)
        } else {
            write!(f, "{field}: {why}")
        }
    }
}

/// Reads the needed fields of JSON text.
pub(crate) fn read<T: DeserializeOwned>(text: &str, needed: Needed) -> Result<T, Misread> {
    let misread = |field, error: serde_json::Error| {
        let why = error.to_string();
        let why = why
            .rsplit_once(" at line ")
            .map_or(why.as_str(), |(why, _)| why)
            .to_owned();
        Misread { field, why }
    };
    let kept = Kept::of(text.as_bytes(), needed, None)
        .map_err(|error| misread(String::new(), error))?
        .text;
    serde_json::from_slice(&kept).map_err(|error| {
        // The text has one line. A second pass finds the value that ends or begins at the column.
        let place = Kept::of(&kept, Needed::All, Some(error.column()))
            .ok()
            .and_then(|kept| kept.place);
        misread(place.unwrap_or_default(), error)
    })
}

/// The needed part of a text, again as text.
#[derive(Default)]
struct Kept {
    text: Vec<u8>,
    /// The number of bytes before the end, or before the beginning, of the searched value.
    column: Option<usize>,
    /// The fields and items down to the current value, during a search.
    path: Vec<String>,
    place: Option<String>,
}

impl Kept {
    fn of(text: &[u8], needed: Needed, column: Option<usize>) -> serde_json::Result<Self> {
        let mut kept = Self {
            column,
            ..Self::default()
        };
        Sieve {
            needed,
            kept: &mut kept,
        }
        .deserialize(&mut serde_json::Deserializer::from_slice(text))?;
        Ok(kept)
    }

    fn put<E: Error>(&mut self, value: impl Serialize) -> Result<bool, E> {
        serde_json::to_writer(&mut self.text, &value).map_err(E::custom)?;
        Ok(true)
    }

    fn separate(&mut self, start: usize) {
        if self.text.len() > start {
            self.text.push(b',');
        }
    }

    /// Writes a field or an item. `write` returns false for a null; the text is then cut back to
    /// `before`.
    fn member<E>(
        &mut self,
        before: usize,
        step: impl FnOnce() -> String,
        write: impl FnOnce(&mut Self) -> Result<bool, E>,
    ) -> Result<(), E> {
        let start = self.text.len();
        let column = self.column.filter(|_| self.place.is_none());
        if column.is_some() {
            self.path.push(step());
        }
        if !write(self)? {
            self.text.truncate(before);
        }
        if let Some(column) = column {
            if self.place.is_none() && (start..=self.text.len()).contains(&column) {
                self.place = Some(self.path.concat().trim_start_matches('.').to_owned());
            }
            self.path.pop();
        }
        Ok(())
    }
}

/// Copies the needed part of a value. Yields false for a null.
struct Sieve<'a> {
    needed: Needed,
    kept: &'a mut Kept,
}

impl<'de> DeserializeSeed<'de> for Sieve<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Sieve<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<bool, E> {
        self.kept.put(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<bool, E> {
        self.kept.put(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<bool, E> {
        self.kept.put(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<bool, E> {
        self.kept.put(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<bool, E> {
        self.kept.put(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        let Self { needed, kept } = self;
        kept.text.push(b'[');
        let start = kept.text.len();
        let mut is_over = false;
        let mut index = 0;
        while !is_over {
            let before = kept.text.len();
            kept.separate(start);
            let step = || format!("[{index}]");
            kept.member(before, step, |kept| {
                let item = items.next_element_seed(Sieve { needed, kept })?;
                is_over = item.is_none();
                Ok(item.unwrap_or(false))
            })?;
            index += 1;
        }
        kept.text.push(b']');
        Ok(true)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<bool, A::Error> {
        let Self { needed, kept } = self;
        kept.text.push(b'{');
        let start = kept.text.len();
        loop {
            let before = kept.text.len();
            kept.separate(start);
            let Some(field) = fields.next_key_seed(Field { needed, kept })? else {
                kept.text.truncate(before);
                break;
            };
            let Some(Key { needed, step }) = field else {
                kept.text.truncate(before);
                fields.next_value::<IgnoredAny>()?;
                continue;
            };
            kept.text.push(b':');
            kept.member(
                before,
                || step,
                |kept| fields.next_value_seed(Sieve { needed, kept }),
            )?;
        }
        kept.text.push(b'}');
        Ok(true)
    }
}

struct Field<'a> {
    needed: Needed,
    kept: &'a mut Kept,
}

/// The needed part of a field, and its name during a search.
struct Key {
    needed: Needed,
    step: String,
}

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<Key>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Field<'_> {
    type Value = Option<Key>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        let Some(needed) = self.needed.of(name) else {
            return Ok(None);
        };
        self.kept.put(name)?;
        Ok(Some(Key {
            needed,
            step: self
                .kept
                .column
                .map(|_| format!(".{name}"))
                .unwrap_or_default(),
        }))
    }
}

#[cfg(test)]
mod tests;
