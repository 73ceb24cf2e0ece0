//! One YAML file as a tree, with the line of any key on demand.
//!
//! serde_yaml's own `Value` forgets positions and reports a duplicate key at the start of its mapping. Reading through
//! seeds gives both: a duplicate is refused at its own line, and [`Document::line_of`] walks the text a second time,
//! only when an error has to be placed.

use crate::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_yaml::{Mapping, Value};
use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};

/// One step from a tree's root to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    Key(String),
    Index(usize),
}

/// `arms[1].set`, as people write a place in a tree.
pub(super) fn dotted(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Key(key) if text.is_empty() => text.push_str(key),
            Segment::Key(key) => {
                text.push('.');
                text.push_str(key);
            }
            Segment::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// A YAML file that has been read: its tree, and its text for finding lines.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub path: PathBuf,
    pub tree: Value,
    text: String,
}

impl Document {
    /// Reads and parses one file. Exit 78 whatever is wrong with it: a recipe is configuration, not data.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
        let text = String::from_utf8(bytes).map_err(|error| not_text(path, &error))?;
        let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
        let tree = parse(&text, path)?;
        if tree.is_null() {
            return Err(Error::refused("empty_file", "the file is empty").at(path).hint("write a recipe into it"));
        }
        Ok(Self { path: path.to_owned(), tree, text })
    }

    /// `configs/x.yaml line 41`, or the file alone if the key cannot be found.
    pub fn place(&self, path: &[Segment]) -> String {
        // A key that is missing has no line: its parent's is the nearest.
        let line = (1..=path.len()).rev().find_map(|depth| self.line_of(path.get(..depth)?));
        match line {
            Some(line) => format!("{} line {line}", self.path.display()),
            None => self.path.display().to_string(),
        }
    }

    /// Line, from 1, of the last key of `path`.
    pub fn line_of(&self, path: &[Segment]) -> Option<usize> {
        let failure = Locate { path }.deserialize(serde_yaml::Deserializer::from_str(&self.text)).err()?;
        (message_of(&failure) == FOUND).then(|| failure.location().map(|location| location.line())).flatten()
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => Error::refused("file_missing", "no such file").at(path),
        std::io::ErrorKind::IsADirectory => {
            Error::refused("unreadable", "a folder, where a YAML file is needed").at(path)
        }
        _ => Error::refused("unreadable", format!("cannot be read: {error}")).at(path),
    }
}

fn not_text(path: &Path, error: &std::string::FromUtf8Error) -> Error {
    let valid = error.as_bytes().get(..error.utf8_error().valid_up_to()).unwrap_or_default();
    let line = 1 + valid.iter().filter(|&&byte| byte == b'\n').count();
    Error::refused("not_text", "not UTF-8 text")
        .in_place(format!("{} line {line}", path.display()))
        .hint("save the file as UTF-8")
}

fn parse(text: &str, path: &Path) -> Result<Value> {
    let duplicate = RefCell::new(None);
    let reader = Tree { path: Vec::new(), duplicate: &duplicate };
    // A file of comments alone has no document at all: the reader would report the end of its stream.
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Ok(Value::Null);
    }
    let mut documents = serde_yaml::Deserializer::from_str(text);
    let Some(first) = documents.next() else { return Ok(Value::Null) };
    let tree = reader.deserialize(first).map_err(|error| {
        let line = error.location().map(|location| location.line());
        let place = match line {
            Some(line) => format!("{} line {line}", path.display()),
            None => path.display().to_string(),
        };
        if let Some(key) = duplicate.borrow_mut().take() {
            let what = format!("{} stands twice", dotted(&key));
            return Error::refused("duplicate_key", what).in_place(place).hint("keep one of the two");
        }
        let indented_by_tab = line
            .and_then(|line| text.lines().nth(line.saturating_sub(1)))
            .is_some_and(|line| line.chars().take_while(|letter| letter.is_whitespace()).any(|letter| letter == '\t'));
        if indented_by_tab {
            return Error::refused("bad_yaml", "a tab in the indentation")
                .in_place(place)
                .hint("YAML indents with spaces");
        }
        Error::refused("bad_yaml", format!("not valid YAML: {}", message_of(&error))).in_place(place)
    })?;
    match documents.next() {
        Some(_) => {
            Err(Error::refused("bad_yaml", "more than one YAML document").at(path).hint("remove the --- between them"))
        }
        None => Ok(tree),
    }
}

/// serde_yaml's sentence without the path and position it wraps around it.
fn message_of(error: &serde_yaml::Error) -> String {
    let text = error.to_string();
    let text = match text.rfind(" at line ") {
        // Scanner errors name two positions; the first sentence is the one that says what is wrong.
        Some(_) => text.split(" at line ").next().unwrap_or(&text).to_owned(),
        None => text,
    };
    match text.rsplit_once(": ") {
        Some((_, FOUND)) => FOUND.to_owned(),
        _ => text,
    }
}

/// Builds a [`Value`], refusing duplicate keys.
struct Tree<'a> {
    path: Vec<Segment>,
    duplicate: &'a RefCell<Option<Vec<Segment>>>,
}

impl Tree<'_> {
    fn child(&self, segment: Segment) -> Self {
        let mut path = self.path.clone();
        path.push(segment);
        Self { path, duplicate: self.duplicate }
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a plain value (no !tag)")
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(self.child(Segment::Index(items.len())))? {
            items.push(item);
        }
        Ok(Value::Sequence(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut mapping = Mapping::new();
        while let Some(key) = access.next_key_seed(NewKey { tree: &self, mapping: &mapping })? {
            let value = access.next_value_seed(self.child(Segment::Key(key.clone())))?;
            mapping.insert(key.into(), value);
        }
        Ok(Value::Mapping(mapping))
    }
}

/// A key that must not stand in the mapping yet. Failing here, inside the key, gives the error the key's own line.
struct NewKey<'a, 'b> {
    tree: &'a Tree<'b>,
    mapping: &'a Mapping,
}

impl<'de> DeserializeSeed<'de> for NewKey<'_, '_> {
    type Value = String;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for NewKey<'_, '_> {
    type Value = String;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<String, E> {
        if self.mapping.contains_key(key) {
            *self.tree.duplicate.borrow_mut() = Some(self.tree.child(Segment::Key(key.to_owned())).path);
            return Err(E::custom("duplicate key"));
        }
        Ok(key.to_owned())
    }
}

const FOUND: &str = "the key that was looked for";

/// Walks to `path` and fails there, so that the error carries the position.
struct Locate<'a> {
    path: &'a [Segment],
}

impl<'de> DeserializeSeed<'de> for Locate<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.path {
            [Segment::Index(_), ..] => deserializer.deserialize_seq(self),
            [Segment::Key(_), ..] => deserializer.deserialize_map(self),
            // The match of the last key has ended the walk before.
            [] => deserializer.deserialize_ignored_any(IgnoredAny).map(drop),
        }
    }
}

impl<'de> Visitor<'de> for Locate<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the way to a key")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        let Some((Segment::Key(wanted), rest)) = self.path.split_first() else { return Ok(()) };
        while let Some(matched) = access.next_key_seed(Match { wanted, last: rest.is_empty() })? {
            if matched {
                access.next_value_seed(Locate { path: rest })?;
            } else {
                access.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        let Some((Segment::Index(wanted), rest)) = self.path.split_first() else { return Ok(()) };
        for index in 0.. {
            if index == *wanted {
                // An element has no key of its own: without one further down, its list's key is the place to name.
                if !rest.is_empty() {
                    access.next_element_seed(Locate { path: rest })?;
                }
                return Ok(());
            }
            if access.next_element::<IgnoredAny>()?.is_none() {
                break;
            }
        }
        Ok(())
    }
}

/// A key that is compared with the wanted one; at the last step a match is the end of the walk.
struct Match<'a> {
    wanted: &'a str,
    last: bool,
}

impl<'de> DeserializeSeed<'de> for Match<'_> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Match<'_> {
    type Value = bool;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<bool, E> {
        match key == self.wanted {
            true if self.last => Err(E::custom(FOUND)),
            matched => Ok(matched),
        }
    }
}
