//! The grammar of GRUB's language, as far as configurations have it.

use super::DEEPEST;

/// Most commands that are looked at.
const MOST: usize = 20_000;

/// Part of a word: text or a variable.
#[derive(Debug)]
pub enum Piece {
    /// As it is written.
    Text(String),
    /// The name of a variable.
    Variable(String),
}

/// A word.
pub type Word = Vec<Piece>;

/// A command.
#[derive(Debug, Default)]
pub struct Node {
    /// Words; the first one names the command.
    pub words: Vec<Word>,
    /// Commands in the braces after the words.
    pub block: Option<Vec<Node>>,
}

/// The commands of a configuration.
pub fn parse(text: &str) -> Vec<Node> {
    let mut parser = Parser {
        characters: text.chars().peekable(),
        nodes: 0,
    };
    parser.nodes(0)
}

struct Parser<'a> {
    characters: std::iter::Peekable<std::str::Chars<'a>>,
    nodes: usize,
}

impl Parser<'_> {
    /// The commands up to the end, or to the brace that closes them.
    fn nodes(&mut self, depth: usize) -> Vec<Node> {
        let mut found = Vec::new();
        let mut node = Node::default();
        while let Some(character) = self.characters.next() {
            match character {
                ' ' | '\t' | '\r' => {}
                '#' => while self.characters.next_if(|next| *next != '\n').is_some() {},
                '\n' | ';' => self.end(&mut node, &mut found),
                '}' => {
                    if depth > 0 {
                        break;
                    }
                }
                '{' => {
                    let inner = match depth < DEEPEST {
                        true => self.nodes(depth.saturating_add(1)),
                        false => Vec::new(),
                    };
                    node.block = Some(inner);
                    self.end(&mut node, &mut found);
                }
                first => {
                    let word = self.word(first);
                    // `then set x=1`: the command begins behind it.
                    let keyword = matches!(word.as_slice(), [Piece::Text(text)]
                        if node.words.is_empty() && matches!(text.as_str(), "then" | "else" | "do"));
                    if !keyword {
                        node.words.push(word);
                    }
                }
            }
        }
        self.end(&mut node, &mut found);
        found
    }

    fn end(&mut self, node: &mut Node, found: &mut Vec<Node>) {
        let node = std::mem::take(node);
        if !node.words.is_empty() && self.nodes < MOST {
            self.nodes = self.nodes.saturating_add(1);
            found.push(node);
        }
    }

    fn word(&mut self, first: char) -> Word {
        let mut word = Vec::new();
        let mut text = String::new();
        let mut next = Some(first);
        while let Some(character) = next {
            match character {
                '\'' => {
                    for quoted in self.characters.by_ref() {
                        match quoted {
                            '\'' => break,
                            other => text.push(other),
                        }
                    }
                }
                '"' => self.quoted(&mut word, &mut text),
                '\\' => match self.characters.next() {
                    // An escaped line break continues the line.
                    Some('\n') | None => {}
                    Some(other) => text.push(other),
                },
                '$' => self.variable(&mut word, &mut text),
                other => text.push(other),
            }
            next = self
                .characters
                .next_if(|next| !matches!(*next, ' ' | '\t' | '\r' | '\n' | ';' | '{' | '}'));
        }
        word.push(Piece::Text(text));
        word.retain(|piece| !matches!(piece, Piece::Text(text) if text.is_empty()));
        word
    }

    fn quoted(&mut self, word: &mut Word, text: &mut String) {
        while let Some(character) = self.characters.next() {
            match character {
                '"' => break,
                '\\' => match self.characters.next() {
                    Some(other @ ('"' | '\\' | '$')) => text.push(other),
                    Some('\n') | None => {}
                    Some(other) => {
                        text.push('\\');
                        text.push(other);
                    }
                },
                '$' => self.variable(word, text),
                other => text.push(other),
            }
        }
    }

    /// `$name` or `${name}`; the dollar sign has been read.
    fn variable(&mut self, word: &mut Word, text: &mut String) {
        let braces = self.characters.next_if_eq(&'{').is_some();
        let mut name = String::new();
        while let Some(letter) = self
            .characters
            .next_if(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '?' | '@'))
        {
            name.push(letter);
        }
        if braces {
            self.characters.next_if_eq(&'}');
        }
        if name.is_empty() {
            text.push('$');
            return;
        }
        word.push(Piece::Text(std::mem::take(text)));
        word.push(Piece::Variable(name));
    }
}
