//! Tables in the manner of kubectl: columns padded with spaces, no lines.

use crate::failure::printable;

/// Spaces between columns.
const GAP: usize = 3;

/// A table that keeps the widths of its columns when more rows follow later.
#[derive(Debug)]
pub struct Table {
    headers: Vec<String>,
    widths: Vec<usize>,
}

impl Table {
    /// One with these columns.
    pub fn new<H: Into<String>>(headers: Vec<H>) -> Self {
        let headers: Vec<String> = headers.into_iter().map(Into::into).collect();
        let widths = headers.iter().map(|header| header.chars().count()).collect();
        Self { headers, widths }
    }

    /// The line with the columns' names, as wide as the rows laid out so far need.
    pub fn header(&self) -> String {
        self.pad(self.headers.iter().map(String::as_str))
    }

    /// Makes the columns wide enough for a row.
    pub fn fit(&mut self, row: &[String]) {
        for (width, cell) in self.widths.iter_mut().zip(row) {
            *width = (*width).max(shown(cell).chars().count());
        }
    }

    /// A row as a line. An empty cell is shown as `-`.
    pub fn row(&self, row: &[String]) -> String {
        let cells: Vec<_> = row.iter().map(|cell| shown(cell)).collect();
        self.pad(cells.iter().map(String::as_str))
    }

    /// Header and rows.
    pub fn whole(&mut self, rows: &[Vec<String>], headers: bool) -> String {
        for row in rows {
            self.fit(row);
        }
        let header = headers.then(|| self.header());
        let rows = rows.iter().map(|row| self.row(row));
        header.into_iter().chain(rows).map(|line| line + "\n").collect()
    }

    fn pad<'a>(&self, cells: impl Iterator<Item = &'a str>) -> String {
        let mut line = String::new();
        for (cell, width) in cells.zip(&self.widths) {
            line.push_str(cell);
            let missing = (width + GAP).saturating_sub(cell.chars().count());
            line.extend(std::iter::repeat_n(' ', missing));
        }
        line.truncate(line.trim_end_matches(' ').len());
        line
    }
}

fn shown(cell: &str) -> String {
    if cell.is_empty() {
        "-".into()
    } else {
        printable(cell)
    }
}
