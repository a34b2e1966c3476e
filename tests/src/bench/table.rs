//! Tables in Markdown: a row a figure, a column a VMM, and ratios of ours to each other one.

use std::fmt::{self, Write};

use super::{median, quantile};

/// Figures of one kind: of ours first, then of the others in the order of the header.
pub struct Row {
    /// Name with its unit.
    pub name: String,
    /// The medians.
    pub values: Vec<f64>,
    /// Ours to each other, where that is not the quotient of the medians.
    pub ratios: Option<Vec<Option<Ratio>>>,
}

/// A ratio; of several their median.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// What it is.
    pub value: f64,
    /// Lower and upper quartile of several ratios.
    pub quartiles: Option<(f64, f64)>,
}

impl Ratio {
    /// `None` of nothing.
    fn of(ratios: &[f64]) -> Option<Self> {
        (!ratios.is_empty()).then(|| Self {
            value: quantile(ratios, 0.5),
            quartiles: Some((quantile(ratios, 0.25), quantile(ratios, 0.75))),
        })
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}", self.value)?;
        match self.quartiles {
            Some((low, high)) => write!(f, " ({low:.2}–{high:.2})"),
            None => Ok(()),
        }
    }
}

impl Row {
    /// A row whose ratios are those of the medians.
    pub fn new(name: impl Into<String>, values: Vec<f64>) -> Self {
        Self {
            name: name.into(),
            values,
            ratios: None,
        }
    }

    /// Creates a row from figures that were measured in turn, with the number of the turn: ours
    /// first, then each other's. Only figures of the same turn are compared.
    pub fn of_turns(name: impl Into<String>, turns: &[Vec<(u32, f64)>]) -> Self {
        let values = turns
            .iter()
            .map(|figures| median(figures.iter().map(|(_, figure)| *figure)));
        let ours = turns.first().map_or(&[][..], Vec::as_slice);
        let ratio = |theirs: &Vec<(u32, f64)>| {
            let ratios = ours.iter().filter_map(|(turn, figure)| {
                let (_, other) = theirs.iter().find(|(number, _)| number == turn)?;
                (*other > 0.0).then(|| figure / other)
            });
            let ratios: Vec<f64> = ratios.collect();
            Ratio::of(&ratios)
        };
        Self {
            name: name.into(),
            values: values.collect(),
            ratios: Some(turns.iter().skip(1).map(ratio).collect()),
        }
    }

    fn ratio(&self, other: usize) -> Option<Ratio> {
        if let Some(ratios) = &self.ratios {
            return *ratios.get(other.checked_sub(1)?)?;
        }
        let (ours, other) = (self.values.first()?, self.values.get(other)?);
        (*other > 0.0).then(|| Ratio {
            value: ours / other,
            quartiles: None,
        })
    }
}

/// The table. `names` are the columns' VMMs, ours first. A ratio below 1 means that ours needs less.
pub fn render(names: &[&str], rows: &[Row]) -> String {
    let ratios: Vec<_> = names
        .iter()
        .skip(1)
        .map(|name| format!("ours ÷ {name}"))
        .collect();
    with_ratios(names, &ratios, rows)
}

/// The table of two columns whose ratio, of the first to the second one, has that name.
pub fn compared(names: &[&str; 2], ratio: &str, rows: &[Row]) -> String {
    with_ratios(names, &[ratio.to_owned()], rows)
}

fn with_ratios(names: &[&str], ratios: &[String], rows: &[Row]) -> String {
    let mut text = String::from("| |");
    for name in names.iter().copied().chain(ratios.iter().map(String::as_str)) {
        write!(text, " {name} |").ok();
    }
    text += "\n|---|";
    text += &"---:|".repeat((names.len() * 2).saturating_sub(1));
    text.push('\n');
    for row in rows {
        write!(text, "| {} |", row.name).ok();
        for value in &row.values {
            write!(text, " {} |", figure(*value)).ok();
        }
        for other in 1..row.values.len() {
            match row.ratio(other) {
                Some(ratio) => write!(text, " {ratio} |").ok(),
                None => write!(text, " – |").ok(),
            };
        }
        text.push('\n');
    }
    text
}

/// The table without ratios: columns that are not compared with the first one.
pub fn plain(names: &[&str], rows: &[Row]) -> String {
    let mut text = format!(
        "| | {} |\n|---|{}\n",
        names.join(" | "),
        "---:|".repeat(names.len())
    );
    for row in rows {
        let figures = row.values.iter().map(|value| match value.is_nan() {
            true => "–".to_owned(),
            false => figure(*value),
        });
        writeln!(
            text,
            "| {} | {} |",
            row.name,
            figures.collect::<Vec<_>>().join(" | ")
        )
        .ok();
    }
    text
}

/// A figure with three digits that matter, and commas between thousands.
fn figure(value: f64) -> String {
    if value < 100.0 {
        let decimals = if value < 10.0 { 2 } else { 1 };
        return format!("{value:.decimals$}");
    }
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_each_value_and_the_ratio_of_ours_to_each_other() {
        let rows = [Row::new("exits", vec![3000.0, 6000.0, 24_000.0])];
        let table = render(&["vmm", "microvm", "q35"], &rows);
        assert_eq!(
            table.lines().last(),
            Some("| exits | 3,000 | 6,000 | 24,000 | 0.50 | 0.12 |")
        );
        assert_eq!(table.lines().nth(1), Some("|---|---:|---:|---:|---:|---:|"));
    }

    #[test]
    fn plain_table_has_no_ratios_and_dashes_for_missing_values() {
        let rows = [Row::new("x", vec![3000.0, f64::NAN])];
        assert_eq!(
            plain(&["a", "b"], &rows),
            "| | a | b |\n|---|---:|---:|\n| x | 3,000 | – |\n"
        );
    }

    #[test]
    fn what_the_other_does_not_have_has_no_ratio() {
        let rows = [Row::new("x", vec![1.5, 0.0])];
        assert!(render(&["vmm", "q35"], &rows).ends_with("| 1.50 | 0.00 | – |\n"));
        let rows = [Row::of_turns("x", &[vec![(0, 1.5)], vec![(1, 3.0)]])];
        assert!(render(&["vmm", "q35"], &rows).ends_with("| 1.50 | 3.00 | – |\n"));
    }

    #[test]
    fn what_was_measured_in_turn_is_compared_within_its_turn() {
        // The machine was ten times slower in the second turn, and ours ran last in it.
        let ours = vec![(0, 1.0), (2, 3.0), (1, 20.0)];
        let theirs = vec![(0, 2.0), (1, 40.0), (2, 3.0)];
        let row = Row::of_turns("x", &[ours, theirs]);
        assert_eq!(row.values, [3.0, 3.0]);
        let ratio = Ratio {
            value: 0.5,
            quartiles: Some((0.5, 0.75)),
        };
        assert_eq!(row.ratios, Some(vec![Some(ratio)]));
        assert!(render(&["vmm", "q35"], &[row]).ends_with("| 3.00 | 3.00 | 0.50 (0.50–0.75) |\n"));
    }
}
