//! Tables in Markdown: a row a figure, a column a VMM, and ratios of ours to each other one.

use std::fmt::Write;

/// Figures of one kind: of ours first, then of the others in the order of the header.
pub struct Row {
    /// What it is, with its unit.
    pub name: String,
    /// The medians.
    pub values: Vec<f64>,
}

/// The table. `names` are the columns' VMMs, ours first. A ratio below 1 means that ours needs less.
pub fn render(names: &[&str], rows: &[Row]) -> String {
    let mut text = String::from("| |");
    for name in names {
        write!(text, " {name} |").ok();
    }
    for name in names.iter().skip(1) {
        write!(text, " ours ÷ {name} |").ok();
    }
    text += "\n|---|";
    text += &"---:|".repeat((names.len() * 2).saturating_sub(1));
    text.push('\n');
    for row in rows {
        write!(text, "| {} |", row.name).ok();
        for value in &row.values {
            write!(text, " {} |", figure(*value)).ok();
        }
        let ours = row.values.first().copied().unwrap_or(0.0);
        for other in row.values.iter().skip(1) {
            if *other == 0.0 {
                text += " – |";
            } else {
                write!(text, " {:.2} |", ours / other).ok();
            }
        }
        text.push('\n');
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
        let rows = [Row {
            name: "exits".into(),
            values: vec![3000.0, 6000.0, 24_000.0],
        }];
        let table = render(&["vmm", "microvm", "q35"], &rows);
        assert_eq!(
            table.lines().last(),
            Some("| exits | 3,000 | 6,000 | 24,000 | 0.50 | 0.12 |")
        );
        assert_eq!(table.lines().nth(1), Some("|---|---:|---:|---:|---:|---:|"));
    }

    #[test]
    fn what_the_other_does_not_have_has_no_ratio() {
        let rows = [Row {
            name: "x".into(),
            values: vec![1.5, 0.0],
        }];
        assert!(render(&["vmm", "q35"], &rows).ends_with("| 1.50 | 0.00 | – |\n"));
    }
}
