//! YAML documents as trees that remember where each node stands and how a scalar was written.
//!
//! Scalars stay text: whether `true` is a boolean or a name is for the schema to say.

use std::collections::HashMap;

use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle, Span};

/// Most nodes in one file, copies made by aliases included. A manifest has some dozens.
const MAX_NODES: usize = 100_000;

/// A place in a file, both counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Line.
    pub line: usize,
    /// Column in characters.
    pub column: usize,
}

/// A node and where it begins.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where it begins.
    pub mark: Mark,
    /// What it is.
    pub value: Value,
}

/// Content of a node.
#[derive(Clone, Debug)]
pub enum Value {
    /// A scalar's text.
    Scalar {
        /// After escapes.
        text: String,
        /// Written without quotes.
        plain: bool,
    },
    /// A list.
    Sequence(Vec<Node>),
    /// Keys and values in the order of the file; keys may repeat.
    Mapping(Vec<(Key, Node)>),
}

/// A key of a mapping.
#[derive(Clone, Debug)]
pub struct Key {
    /// Where it stands.
    pub mark: Mark,
    /// Its text.
    pub name: String,
}

impl Node {
    /// An absent value: nothing, `~` or `null`.
    pub fn is_null(&self) -> bool {
        match &self.value {
            Value::Scalar { text, plain: true } => {
                matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }

    /// Returns the name of the node's type in messages.
    pub fn kind(&self) -> &'static str {
        match &self.value {
            _ if self.is_null() => "nothing",
            Value::Scalar { .. } => "a single value",
            Value::Sequence(_) => "a list",
            Value::Mapping(_) => "a mapping",
        }
    }

    fn count(&self) -> usize {
        match &self.value {
            Value::Scalar { .. } => 1,
            Value::Sequence(items) => items.iter().map(Self::count).sum::<usize>() + 1,
            Value::Mapping(entries) => entries.iter().map(|(_, node)| node.count()).sum::<usize>() + 1,
        }
    }
}

/// Why a file is no YAML that can be used.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Where.
    pub mark: Mark,
    /// What is wrong.
    pub message: String,
}

impl From<Error> for super::Problem {
    fn from(error: Error) -> Self {
        Self {
            mark: Some(error.mark),
            path: String::new(),
            text: error.message,
        }
    }
}

impl Error {
    fn new(mark: Mark, message: impl Into<String>) -> Self {
        Self {
            mark,
            message: message.into(),
        }
    }
}

/// Reads all documents of a file; empty ones are left out.
pub fn documents(text: &str) -> Result<Vec<Node>, Error> {
    let mut reader = Reader {
        events: Parser::new_from_str(text),
        anchors: HashMap::new(),
        nodes: 0,
    };
    let mut documents = Vec::new();
    while let Some((event, span)) = reader.next()? {
        match event {
            Event::StreamStart | Event::DocumentEnd => {}
            Event::DocumentStart(..) => reader.anchors.clear(),
            Event::StreamEnd => break,
            event => {
                let node = reader.node(event, span)?;
                if !node.is_null() {
                    documents.push(node);
                }
            }
        }
    }
    Ok(documents)
}

struct Reader<'a, I: Iterator<Item = ParsedEvent<'a>>> {
    events: I,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

type ParsedEvent<'a> = Result<(Event<'a>, Span), serde_saphyr::granit_parser::ScanError>;

impl<'a, I: Iterator<Item = ParsedEvent<'a>>> Reader<'a, I> {
    /// The next event that is not a comment.
    fn next(&mut self) -> Result<Option<(Event<'a>, Span)>, Error> {
        loop {
            match self.events.next() {
                None => return Ok(None),
                Some(Ok((Event::Comment(..), _))) => {}
                Some(Ok(event)) => return Ok(Some(event)),
                Some(Err(error)) => {
                    let marker = error.marker();
                    let mark = Mark {
                        line: marker.line(),
                        column: marker.col() + 1,
                    };
                    return Err(Error::new(mark, format!("not valid YAML: {}", error.info())));
                }
            }
        }
    }

    /// The next event inside a collection that began at `mark`.
    fn inside(&mut self, mark: Mark) -> Result<(Event<'a>, Span), Error> {
        self.next()?
            .ok_or_else(|| Error::new(mark, "not valid YAML: ends too early"))
    }

    /// The node that begins with `event`. The parser bounds the depth (255).
    fn node(&mut self, event: Event<'a>, span: Span) -> Result<Node, Error> {
        let mark = mark(span);
        self.budget(mark, 1)?;
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, _tag) => {
                let plain = style == ScalarStyle::Plain;
                (
                    Value::Scalar {
                        text: text.into_owned(),
                        plain,
                    },
                    anchor,
                )
            }
            Event::SequenceStart(_, anchor, _) => (self.sequence(mark)?, anchor),
            Event::MappingStart(_, anchor, _) => (self.mapping(mark)?, anchor),
            Event::Alias(id) => {
                let node = self.anchors.get(&id).cloned();
                let node = node.ok_or_else(|| Error::new(mark, "an alias to what holds it"))?;
                self.budget(mark, node.count())?;
                return Ok(Node { mark, ..node });
            }
            _ => return Err(Error::new(mark, "not valid YAML here")),
        };
        let node = Node { mark, value };
        if anchor != 0 {
            self.budget(mark, node.count())?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn sequence(&mut self, mark: Mark) -> Result<Value, Error> {
        let mut items = Vec::new();
        loop {
            match self.inside(mark)? {
                (Event::SequenceEnd, _) => return Ok(Value::Sequence(items)),
                (event, span) => items.push(self.node(event, span)?),
            }
        }
    }

    fn mapping(&mut self, mark: Mark) -> Result<Value, Error> {
        let mut entries = Vec::new();
        loop {
            let (event, span) = self.inside(mark)?;
            if matches!(event, Event::MappingEnd) {
                return Ok(Value::Mapping(entries));
            }
            let key = self.node(event, span)?;
            let Value::Scalar { text: name, .. } = key.value else {
                return Err(Error::new(
                    key.mark,
                    format!("a key must be a word, is {}", key.kind()),
                ));
            };
            let (event, span) = self.inside(mark)?;
            let value = self.node(event, span)?;
            entries.push((Key { mark: key.mark, name }, value));
        }
    }

    fn budget(&mut self, mark: Mark, nodes: usize) -> Result<(), Error> {
        self.nodes = self.nodes.saturating_add(nodes);
        if self.nodes > MAX_NODES {
            return Err(Error::new(
                mark,
                format!("too large: more than {MAX_NODES} values"),
            ));
        }
        Ok(())
    }
}

fn mark(span: Span) -> Mark {
    Mark {
        line: span.start.line(),
        column: span.start.col() + 1,
    }
}
