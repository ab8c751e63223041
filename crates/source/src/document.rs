//! Parses YAML and JSON into values with line numbers.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::DuplicateKeyPolicy;
use serde_saphyr::{MessageFormatter as _, Spanned, UserMessageFormatter};

/// A parsed YAML or JSON document.
#[derive(Debug)]
pub struct Document {
    /// The number of lines before the document.
    before: u64,
    root: Spanned<Tree>,
}

/// The reason why a text cannot be parsed.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreadable {
    pub line: u64,
    pub why: String,
}

#[derive(Debug)]
enum Tree {
    Scalar(Value),
    List(Vec<Spanned<Tree>>),
    Map(Vec<(Spanned<String>, Spanned<Tree>)>),
}

/// Returns the documents of a file in order, including those after an unreadable document.
pub fn documents(text: &str) -> impl Iterator<Item = Result<Document, Unreadable>> {
    documents_with(text, DuplicateKeyPolicy::Error)
}

pub fn documents_with(
    text: &str,
    duplicates: DuplicateKeyPolicy,
) -> impl Iterator<Item = Result<Document, Unreadable>> {
    let mut line = 0;
    split(text).into_iter().filter_map(move |part| {
        let before = line;
        line += part.matches('\n').count() as u64;
        (!is_blank(part)).then(|| Document::parse(part, before, duplicates))
    })
}

/// Splits a text before each YAML document marker (`---`), and between JSON values without a
/// marker.
fn split(text: &str) -> Vec<&str> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<de::IgnoredAny>();
    let mut ends = vec![0];
    while let Some(Ok(_)) = values.next() {
        ends.push(values.byte_offset());
    }
    if ends.len() > 1 && text[ends[ends.len() - 1]..].trim().is_empty() {
        return ends
            .windows(2)
            .map(|ends| &text[ends[0]..ends[1]])
            .collect();
    }
    let mut starts = vec![0];
    let mut offset = 0;
    for line in text.split_inclusive('\n') {
        // `---` begins a document even within a block scalar, whose lines are indented.
        if line
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
        {
            starts.push(offset);
        }
        offset += line.len();
    }
    starts.push(text.len());
    starts
        .windows(2)
        .map(|ends| &text[ends[0]..ends[1]])
        .collect()
}

/// Returns true if a part has only comments and the directives (`%YAML 1.2`) that may precede the
/// first document.
fn is_blank(part: &str) -> bool {
    part.lines().all(|line| {
        let line = line.strip_prefix("---").unwrap_or(line).trim();
        line.is_empty() || line == "..." || line.starts_with(['#', '%'])
    })
}

impl Document {
    fn parse(text: &str, before: u64, duplicates: DuplicateKeyPolicy) -> Result<Self, Unreadable> {
        let options = serde_saphyr::options! {
            // A List of a cluster's EndpointSlices may have millions of YAML nodes. Aliases have a
            // lower limit.
            budget: serde_saphyr::budget! {
                max_events: 100_000_000,
                max_nodes: 50_000_000,
                max_total_scalar_bytes: usize::MAX,
                max_buffered_comment_events: 100_000,
            },
            alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
            duplicate_keys: duplicates,
        };
        let root = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            let error = error.without_snippet();
            let line = error.location().map_or(1, |location| location.line());
            Unreadable {
                line: before + line,
                why: UserMessageFormatter.format_message(error).into_owned(),
            }
        })?;
        Ok(Self { before, root })
    }

    pub fn value(&self) -> Value {
        self.root.value.value()
    }

    /// Returns the line of a field such as `spec.ports[0].port`, or of the innermost existing field
    /// around a missing field.
    pub fn line(&self, path: &str) -> u64 {
        let mut line = self.root.referenced.line();
        let mut tree = &self.root.value;
        let mut rest = path;
        while let Some((at, child, below)) = tree.child(rest) {
            (line, tree, rest) = (at, child, below);
        }
        self.before + line
    }

    /// Returns the repeated fields of an object, each with the line of its last occurrence.
    pub fn duplicates(&self) -> Vec<(String, u64)> {
        let mut found = Vec::new();
        self.root.value.duplicates("", &mut found);
        found
            .into_iter()
            .map(|(path, line)| (path, self.before + line))
            .collect()
    }
}

impl Tree {
    fn value(&self) -> Value {
        match self {
            Self::Scalar(value) => value.clone(),
            Self::List(items) => items.iter().map(|item| item.value.value()).collect(),
            Self::Map(fields) => {
                let fields = fields
                    .iter()
                    .map(|(key, field)| (key.value.clone(), field.value.value()));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }

    fn duplicates(&self, at: &str, found: &mut Vec<(String, u64)>) {
        match self {
            Self::Scalar(_) => {}
            Self::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.value.duplicates(&format!("{at}[{index}]"), found);
                }
            }
            Self::Map(fields) => {
                for (index, (key, field)) in fields.iter().enumerate() {
                    let path = if at.is_empty() {
                        key.value.clone()
                    } else {
                        format!("{at}.{}", key.value)
                    };
                    if fields[..index]
                        .iter()
                        .any(|(before, _)| before.value == key.value)
                    {
                        found.push((path.clone(), key.referenced.line()));
                    }
                    field.value.duplicates(&path, found);
                }
            }
        }
    }

    /// Follows the first step of `path`. Returns the child's line, its value and the remaining
    /// path.
    fn child<'a>(&self, path: &'a str) -> Option<(u64, &Self, &'a str)> {
        match self {
            Self::Scalar(_) => None,
            Self::List(items) => {
                let (index, rest) = path.strip_prefix('[')?.split_once(']')?;
                let item = items.get(index.parse::<usize>().ok()?)?;
                Some((item.referenced.line(), &item.value, rest))
            }
            // Keys may contain dots, so the longest matching key wins.
            Self::Map(fields) => {
                let path = path.strip_prefix('.').unwrap_or(path);
                let fits = |key: &str| {
                    let rest = path.strip_prefix(key)?;
                    (rest.is_empty() || rest.starts_with(['.', '['])).then_some(rest)
                };
                let fields = fields
                    .iter()
                    .filter_map(|(key, field)| Some((key, field, fits(&key.value)?)));
                let (key, field, rest) = fields.max_by_key(|(key, ..)| key.value.len())?;
                Some((key.referenced.line(), &field.value, rest))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Tree, E> {
        let number =
            Number::from_f64(value).ok_or_else(|| E::custom("a number that JSON does not have"))?;
        Ok(Tree::Scalar(number.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Tree, A::Error> {
        let mut map = Vec::new();
        while let Some(field) = fields.next_entry()? {
            map.push(field);
        }
        Ok(Tree::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_are_found_with_their_lines() {
        check(
            "%YAML 1.2\n---\na: 1\n--- # two\nb: [x, {y: z}]\n---\n# nothing\n---\n--- {c: null}\n...\n",
            expect![[r#"
                1: {"a":1}
                3: {"b":["x",{"y":"z"}]}
                8: {"c":null}
            "#]],
        );
        check(
            "a: |\n  text\n  --- more\n---\nb: \"\n",
            expect![[r#"
                0: {"a":"text\n--- more\n"}
                line 5: unclosed quote
            "#]],
        );
        check(
            "\u{feff}a: 1\r\n---\r\nb: 2\r\n",
            expect![[r#"
            0: {"a":1}
            1: {"b":2}
        "#]],
        );
    }

    #[test]
    fn json_is_read_with_tabs_and_without_separators() {
        check(
            "{\n\t\"a\": 1,\n\t\"b\": \"\\ud83d\\ude00 \\/\"\n}\n{\"c\": 2}\n[3]",
            expect![[r#"
            0: {"a":1,"b":"😀 /"}
            3: {"c":2}
            4: [3]
        "#]],
        );
        check(
            "{\"a\": 1,\n\"b\": }",
            expect![[r#"
            0: {"a":1,"b":null}
        "#]],
        );
    }

    #[test]
    fn bad_document_does_not_hide_the_next() {
        check(
            "a: 1\n---\na: [1\n---\na: 1\na: 2\n---\n\ta: 1\n---\nb: *x\n---\nlast: 1\n",
            expect![[r#"
                0: {"a":1}
                line 3: unclosed bracket '['
                line 6: duplicate mapping key `a` is not allowed here
                6: {"a":1}
                line 10: reference to unknown value
                10: {"last":1}
            "#]],
        );
    }

    #[test]
    fn values_have_the_types_of_yaml_1_2() {
        check(
            "{a: 80, b: '80', c: 1.5, d: true, e: yes, f: ~, g: 2026-01-01, h: 0x10, i: -1, j: 99999999999999999999}",
            expect![[r#"
            0: {"a":80,"b":"80","c":1.5,"d":true,"e":true,"f":null,"g":"2026-01-01","h":16,"i":-1,"j":1e+20}
        "#]],
        );
        check(
            "base: &base {a: 1}\nmore: {<<: *base, b: 2}\n8080: x\n",
            expect![[r#"
            0: {"8080":"x","base":{"a":1},"more":{"a":1,"b":2}}
        "#]],
        );
    }

    #[test]
    fn line_is_that_of_the_field_or_its_parent() {
        let text =
            "# comment\na:\n  list:\n  - x: 1\n    y: 2\n  -\n    x.y/z: 3\n    x: 4\nb: 1\n";
        let document = documents(text).next().unwrap().unwrap();
        for (path, line) in [
            ("", 2),
            ("a", 2),
            ("a.list", 3),
            ("a.list[0]", 4),
            ("a.list[0].y", 5),
            ("a.list[1].x", 8),
            ("a.list[1].x.y/z", 7),
            ("a.list[7].x", 3),
            ("a.missing.field", 2),
            ("b", 9),
            ("c", 2),
        ] {
            assert_eq!(document.line(path), line, "{path}");
        }
    }

    #[test]
    fn long_comment_and_large_list_are_read() {
        let comment = "# more\n".repeat(1000);
        let text = format!("a:\n{comment}- 1\n{comment}- 2\n{comment}b:\n{comment}  c: 3\n");
        assert_eq!(
            documents(&text).next().unwrap().unwrap().value(),
            json!({"a": [1, 2], "b": {"c": 3}})
        );
        let large = format!("[{}0]", "0,".repeat(250_000));
        assert!(documents(&large).next().unwrap().is_ok());
    }

    #[test]
    fn aliases_do_not_explode() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..10 {
            let below = format!("*a{}, ", level - 1).repeat(10);
            text.push_str(&format!("a{level}: &a{level} [{below}]\n"));
        }
        assert!(documents(&text).next().unwrap().is_err());
    }

    fn check(text: &str, expected: Expect) {
        let show = |document: Result<Document, Unreadable>| match document {
            Ok(document) => format!("{}: {}\n", document.before, document.value()),
            Err(Unreadable { line, why }) => format!("line {line}: {why}\n"),
        };
        expected.assert_eq(&documents(text).map(show).collect::<String>());
    }
}
