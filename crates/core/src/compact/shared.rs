//! Interned texts: namespaces, nodes, zones, ports.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shared(Arc<str>);

/// The interned texts, and the count that triggers the removal of unused texts.
static TEXTS: LazyLock<Mutex<Texts>> = LazyLock::new(|| {
    Mutex::new(Texts {
        all: HashSet::new(),
        most: FEW,
    })
});

const FEW: usize = 1_024;

struct Texts {
    all: HashSet<Arc<str>>,
    most: usize,
}

impl From<&str> for Shared {
    fn from(text: &str) -> Self {
        Self(
            TEXTS
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get(text),
        )
    }
}

impl From<&String> for Shared {
    fn from(text: &String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<String> for Shared {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl Texts {
    fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.all.get(text) {
            return Arc::clone(known);
        }
        if self.all.len() >= self.most {
            self.all.retain(|text| Arc::strong_count(text) > 1);
            self.most = FEW.max(2 * self.all.len());
        }
        let new = Arc::<str>::from(text);
        self.all.insert(Arc::clone(&new));
        new
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self::from("")
    }
}

impl Deref for Shared {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Shared {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Shared {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_kept_once_and_as_long_as_it_is_named() {
        let mut texts = Texts {
            all: HashSet::new(),
            most: 2,
        };
        let node = texts.get("node");
        assert!(Arc::ptr_eq(&node, &texts.get("node")));
        for nth in 0..10 * FEW {
            drop(texts.get(&format!("gone-{nth}")));
        }
        assert!(texts.all.len() <= FEW, "{} texts", texts.all.len());
        assert!(Arc::ptr_eq(&node, &texts.get("node")));
    }
}
