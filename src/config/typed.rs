//! A YAML tree -> a typed value, with structured errors.
//!
//! serde's derive reports what went wrong through the error type's constructors, with the list of valid names in
//! hand; serde_yaml flattens that into one sentence. This small deserializer keeps it apart: the path, the key, the
//! valid names. So an override from the command line, which has no line in any file, gets the same exact errors.

use super::document::{Segment, dotted};
use super::types::{Family, Recipe};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::{Serialize, forward_to_deserialize_any};
use serde_yaml::Value;
use std::fmt;

/// What is wrong with one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// No such field; the fields there are.
    UnknownKey {
        key: String,
        expected: Vec<String>,
    },
    MissingKey {
        key: String,
    },
    /// `expected` is serde's word for a type, `found` describes the value.
    WrongType {
        found: String,
        expected: String,
    },
    /// Not one of the names that may stand here.
    UnknownChoice {
        found: String,
        expected: Vec<String>,
    },
    Other(String),
}

/// A fault and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// From the inside out while it travels up; [`Fault::path`] turns it round.
    reversed: Vec<Segment>,
    pub kind: FaultKind,
}

impl Fault {
    fn new(kind: FaultKind) -> Self {
        Self { reversed: Vec::new(), kind }
    }

    fn inside(mut self, segment: Segment) -> Self {
        self.reversed.push(segment);
        self
    }

    /// The faulty node; for an unknown or missing key, that key.
    pub fn path(&self) -> Vec<Segment> {
        let mut path: Vec<Segment> = self.reversed.iter().rev().cloned().collect();
        if let FaultKind::UnknownKey { key, .. } | FaultKind::MissingKey { key } = &self.kind {
            path.push(Segment::Key(key.clone()));
        }
        path
    }

    /// Machine reason.
    pub fn code(&self) -> &'static str {
        match self.kind {
            FaultKind::UnknownKey { .. } => "unknown_key",
            FaultKind::MissingKey { .. } => "missing_key",
            FaultKind::WrongType { .. } => "wrong_type",
            FaultKind::UnknownChoice { .. } => "unknown_choice",
            FaultKind::Other(_) => "bad_value",
        }
    }

    /// What is wrong, with the dotted path.
    pub fn sentence(&self) -> String {
        let path = dotted(&self.path());
        let path = if path.is_empty() { "the file".to_owned() } else { path };
        match &self.kind {
            FaultKind::UnknownKey { .. } => format!("unknown key {path}"),
            FaultKind::MissingKey { .. } => format!("missing key {path}"),
            FaultKind::WrongType { found, expected } => format!("{path}: expected {expected}, found {found}"),
            FaultKind::UnknownChoice { found, .. } => format!("{path}: unknown choice {found:?}"),
            FaultKind::Other(sentence) => format!("{path}: {sentence}"),
        }
    }

    /// What to do: the nearest valid name, or all of them. `everywhere` are the dotted fields of the whole file, for
    /// a key that is right but stands at the wrong level.
    pub fn hint(&self, everywhere: &[String]) -> String {
        match &self.kind {
            FaultKind::UnknownKey { key, expected } => {
                let elsewhere =
                    || everywhere.iter().find(|field| field.rsplit('.').next() == Some(key)).map(String::as_str);
                match nearest(key, expected).or_else(elsewhere) {
                    Some(name) => format!("did you mean {name}?"),
                    None => format!("keys here: {}", expected.join(", ")),
                }
            }
            FaultKind::UnknownChoice { found, expected } => match nearest(found, expected) {
                Some(name) => format!("did you mean {name}?"),
                None => format!("one of: {}", expected.join(", ")),
            },
            _ => String::new(),
        }
    }
}

/// The name that a typing mistake most likely meant: within a third of its letters, at least two.
pub(crate) fn nearest<'a>(name: &str, names: &'a [String]) -> Option<&'a str> {
    let distance = |candidate: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &candidate.to_lowercase());
    let near =
        |candidate: &&String| distance(candidate) <= (candidate.chars().count() / 3).max(2).min(candidate.len() - 1);
    let best = names.iter().filter(|candidate| !candidate.is_empty()).filter(near).min_by_key(|it| distance(it));
    // A name that was cut short or continued is far by letters and near by sense: `warmup` for `warmup_steps`.
    best.or_else(|| {
        let related = |candidate: &&String| {
            name.len() >= 3
                && (candidate.starts_with(name) || name.starts_with(candidate.as_str()) && candidate.len() >= 3)
        };
        names.iter().find(related)
    })
    .map(String::as_str)
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence())
    }
}

impl std::error::Error for Fault {}

impl serde::de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(FaultKind::Other(message.to_string()))
    }
    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(FaultKind::WrongType { found: describe(found), expected: in_words(&expected.to_string()) })
    }
    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }
    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::new(FaultKind::WrongType {
            found: format!("a list of {length}"),
            expected: in_words(&expected.to_string()),
        })
    }
    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(FaultKind::UnknownChoice { found: variant.to_owned(), expected: owned(expected) })
    }
    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new(FaultKind::UnknownKey { key: field.to_owned(), expected: owned(expected) })
    }
    fn missing_field(field: &'static str) -> Self {
        Self::new(FaultKind::MissingKey { key: field.to_owned() })
    }
    fn duplicate_field(field: &'static str) -> Self {
        Self::custom(format!("{field} stands twice"))
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// A value as people name it.
fn describe(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => format!("the number {value}"),
        Unexpected::Signed(value) => format!("the number {value}"),
        Unexpected::Float(value) => format!("the number {value:?}"),
        Unexpected::Str(value) if value.chars().count() > 40 => "a long string".to_owned(),
        Unexpected::Str(value) => format!("the string {value:?}"),
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        other => other.to_string(),
    }
}

/// serde's name of an expected type, as people name it.
fn in_words(expected: &str) -> String {
    match expected {
        "f64" | "f32" => "a number".to_owned(),
        "usize" | "u64" | "u32" => "a whole number, 0 or more".to_owned(),
        "path string" => "a path".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a YAML mapping" | "any YAML mapping" => "a mapping of keys".to_owned(),
        array if array.starts_with("an array of length ") => {
            format!("a list of {}", array.trim_start_matches("an array of length "))
        }
        container if container.starts_with("struct ") || container.starts_with("internally tagged enum ") => {
            "a mapping of keys".to_owned()
        }
        choice if choice.starts_with("enum ") => "a name".to_owned(),
        other => other.to_owned(),
    }
}

/// Converts a tree, refusing every key that the type does not have.
pub(super) fn from_tree<T: DeserializeOwned + Serialize>(tree: &Value) -> Result<T, Fault> {
    let typed = T::deserialize(Node(tree)).map_err(|fault| place_in_tagged(fault, tree))?;
    // serde lets a field-less variant of a tagged enum swallow any key (`text: {kind: hashed_words, path: x}`): what
    // did not come back out was not read.
    let written = serde_yaml::to_value(&typed).map_err(|error| Fault::custom(error.to_string()))?;
    refuse_unread(tree, &written)?;
    Ok(typed)
}

/// A recipe: its family decides which fields there are.
pub(super) fn recipe_from_tree(tree: &Value) -> Result<Recipe, Fault> {
    const FAMILY: &str = "family";
    let Value::Mapping(fields) = tree else { return Err(Fault::invalid_type(unexpected(tree), &"a YAML mapping")) };
    let family = fields.get(FAMILY).ok_or_else(|| Fault::missing_field(FAMILY))?;
    let family = from_tree(family).map_err(|fault| fault.inside(Segment::Key(FAMILY.to_owned())))?;
    let mut fields = fields.clone();
    fields.remove(FAMILY);
    let fields = Value::Mapping(fields);
    let recipe = match family {
        Family::Xwam => from_tree(&fields).map(Recipe::Xwam),
        Family::Lingbot => from_tree(&fields).map(Recipe::Lingbot),
    };
    recipe.map_err(|mut fault| {
        if let (FaultKind::UnknownKey { expected, .. }, true) = (&mut fault.kind, fault.reversed.is_empty()) {
            expected.insert(0, FAMILY.to_owned());
        }
        fault
    })
}

fn refuse_unread(given: &Value, written: &Value) -> Result<(), Fault> {
    let (Value::Mapping(given), Value::Mapping(written)) = (given, written) else { return Ok(()) };
    for (key, value) in given {
        let name = key.as_str().unwrap_or_default().to_owned();
        let Some(read) = written.get(key) else {
            let expected = written.keys().filter_map(Value::as_str).map(str::to_owned).collect();
            return Err(Fault::new(FaultKind::UnknownKey { key: name, expected }));
        };
        refuse_unread(value, read).map_err(|fault| fault.inside(Segment::Key(name)))?;
    }
    Ok(())
}

/// serde buffers a tagged enum before it reads it, and loses the field on the way: find the only one that fits.
fn place_in_tagged(mut fault: Fault, tree: &Value) -> Fault {
    let FaultKind::WrongType { found, .. } = &fault.kind else { return fault };
    let node = fault.path().iter().try_fold(tree, |node, segment| match segment {
        Segment::Key(key) => node.get(key.as_str()),
        Segment::Index(index) => node.get(*index),
    });
    let Some(Value::Mapping(fields)) = node else { return fault };
    let mut fitting = fields.iter().filter(|(_, value)| describe(unexpected(value)) == *found);
    if let (Some((key, _)), None) = (fitting.next(), fitting.next()) {
        fault.reversed.insert(0, Segment::Key(key.as_str().unwrap_or_default().to_owned()));
    }
    fault
}

fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::Null => Unexpected::Unit,
        Value::Bool(value) => Unexpected::Bool(*value),
        Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(value), _, _) => Unexpected::Unsigned(value),
            (_, Some(value), _) => Unexpected::Signed(value),
            (_, _, value) => Unexpected::Float(value.unwrap_or(f64::NAN)),
        },
        Value::String(value) => Unexpected::Str(value),
        Value::Sequence(_) => Unexpected::Seq,
        Value::Mapping(_) => Unexpected::Map,
        Value::Tagged(_) => Unexpected::Enum,
    }
}

/// A tree being read.
struct Node<'a>(&'a Value);

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), _, _) => visitor.visit_u64(value),
                (_, Some(value), _) => visitor.visit_i64(value),
                (_, _, value) => visitor.visit_f64(value.unwrap_or(f64::NAN)),
            },
            Value::String(value) => visitor.visit_borrowed_str(value),
            Value::Sequence(items) => {
                let mut access = Items { items: items.iter(), index: 0 };
                let read = visitor.visit_seq(&mut access)?;
                match access.items.len() {
                    0 => Ok(read),
                    // An array of fixed length stops reading at its end.
                    _ => Err(Fault::new(FaultKind::WrongType {
                        found: format!("a list of {}", items.len()),
                        expected: format!("a list of {}", access.index),
                    })),
                }
            }
            Value::Mapping(mapping) => visitor.visit_map(Fields { fields: mapping.iter(), value: None }),
            Value::Tagged(_) => Err(Fault::custom("a !tag has no meaning here")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.0 {
            Value::String(name) => visitor.visit_enum(Choice(name)),
            other => Err(Fault::invalid_type(unexpected(other), &"a name")),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The name of a field-less variant.
struct Choice<'a>(&'a str);

impl<'de> EnumAccess<'de> for Choice<'de> {
    type Error = Fault;
    type Variant = Self;
    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Fault> {
        Ok((seed.deserialize(self.0.into_deserializer())?, self))
    }
}

impl<'de> VariantAccess<'de> for Choice<'de> {
    type Error = Fault;
    fn unit_variant(self) -> Result<(), Fault> {
        Ok(())
    }
    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, Fault> {
        Err(Fault::custom(format!("{} needs a value", self.0)))
    }
    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Fault> {
        Err(Fault::custom(format!("{} needs a list", self.0)))
    }
    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], _: V) -> Result<V::Value, Fault> {
        Err(Fault::custom(format!("{} needs a mapping", self.0)))
    }
}

struct Items<'a> {
    items: std::slice::Iter<'a, Value>,
    index: usize,
}

impl<'de> SeqAccess<'de> for &mut Items<'de> {
    type Error = Fault;
    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some(item) = self.items.next() else { return Ok(None) };
        let read = seed.deserialize(Node(item)).map_err(|fault| fault.inside(Segment::Index(self.index)))?;
        self.index += 1;
        Ok(Some(read))
    }
}

struct Fields<'a> {
    fields: serde_yaml::mapping::Iter<'a>,
    value: Option<(&'a str, &'a Value)>,
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = Fault;
    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((key, value)) = self.fields.next() else { return Ok(None) };
        let name = key.as_str().unwrap_or_default();
        self.value = Some((name, value));
        seed.deserialize(Node(key)).map(Some)
    }
    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (name, value) = self.value.take().ok_or_else(|| Fault::custom("a value without a key"))?;
        seed.deserialize(Node(value)).map_err(|fault| fault.inside(Segment::Key(name.to_owned())))
    }
}
