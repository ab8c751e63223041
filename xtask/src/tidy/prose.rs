//! The rules of prose that a machine can check: how a doc comment starts, and words that name no actor.

use std::fmt;

/// Openings that make a comment a fragment: a doc comment starts with a verb, or with an article and a noun.
const OPENINGS: [&str; 8] = ["What", "Who", "Whom", "Whether", "Of", "Those", "That", "As"];

/// Words that hide the actor: kernel, agent, program, operator, API server or client.
const WORDS: [&str; 6] = ["nobody", "whoever", "whatever", "anew", "whom", "of which"];

/// The most words in a sentence of a comment.
pub(super) const SENTENCE_WORDS: usize = 25;

/// The prose of a file, or of several.
#[derive(Default)]
pub(super) struct Prose {
    pub(super) lines: usize,
    pub(super) sentences: usize,
    pub(super) long_sentences: usize,
    pub(super) breaches: Vec<Breach>,
}

/// A line that breaks a rule.
pub(super) struct Breach {
    path: String,
    line: usize,
    found: &'static str,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {:?}", self.path, self.line, self.found)
    }
}

impl Prose {
    /// Reads the comments of a Rust file.
    pub(super) fn read(&mut self, path: &str, text: &str) {
        let mut block = String::new();
        let mut starts = true;
        for (line, text) in (1..).zip(text.lines()) {
            let Some(comment) = comment(text) else {
                self.sentences_of(&mut block);
                starts = true;
                continue;
            };
            self.lines += 1;
            let found = [opening(comment).filter(|_| starts), word(comment)].into_iter().flatten();
            let breaches = found.take(1).map(|found| Breach { path: path.to_owned(), line, found });
            self.breaches.extend(breaches);
            // A list, a table or a drawing is no sentence.
            let is_text = comment.starts_with(|first: char| first.is_alphanumeric() || first == '`');
            if comment.is_empty() || !is_text {
                self.sentences_of(&mut block);
            }
            if is_text {
                block.push_str(comment);
                block.push(' ');
            }
            starts = comment.is_empty() || comment.ends_with('.');
        }
        self.sentences_of(&mut block);
    }

    fn sentences_of(&mut self, block: &mut String) {
        for sentence in block.split(". ").filter(|sentence| !sentence.trim().is_empty()) {
            self.sentences += 1;
            self.long_sentences += usize::from(sentence.split_whitespace().count() > SENTENCE_WORDS);
        }
        block.clear();
    }
}

/// Returns the text of a line that holds nothing but a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.strip_prefix(['/', '!']).unwrap_or(text).trim())
}

fn opening(comment: &str) -> Option<&'static str> {
    let first = comment.split_whitespace().next()?;
    OPENINGS.into_iter().find(|opening| *opening == first)
}

fn word(comment: &str) -> Option<&'static str> {
    let text = comment.to_lowercase();
    WORDS.into_iter().find(|word| {
        text.match_indices(word).any(|(at, _)| {
            let is_edge = |letter: Option<char>| letter.is_none_or(|letter| !letter.is_alphanumeric() && letter != '_');
            is_edge(text[..at].chars().next_back()) && is_edge(text[at + word.len()..].chars().next())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches(text: &str) -> Vec<String> {
        let mut prose = Prose::default();
        prose.read("a.rs", text);
        prose.breaches.iter().map(Breach::to_string).collect()
    }

    #[test]
    fn rules_find_openings_and_words() {
        let text = "/// What it is.\nfn a() {}\n//! Of a node.\n// Sends, whoever asks.\n/// Says it anew.\n";
        assert_eq!(breaches(text), ["a.rs:1: \"What\"", "a.rs:3: \"Of\"", "a.rs:4: \"whoever\"", "a.rs:5: \"anew\""]);
    }

    #[test]
    fn rules_let_plain_text_pass() {
        let text = "/// The agent sends what\n/// Who asked for it.\nlet nobody = \"anew\"; // whatever\n/// A renewal of `nobody_else`.";
        assert_eq!(breaches(text), [""; 0]);
    }

    #[test]
    fn long_sentences_are_counted_across_lines() {
        let mut prose = Prose::default();
        let half = "word ".repeat(13);
        prose.read("a.rs", &format!("/// {half}\n/// {half}. Short one.\n///\n/// - a list {half}{half}\n"));
        assert_eq!((prose.lines, prose.sentences, prose.long_sentences), (4, 2, 1));
    }
}
