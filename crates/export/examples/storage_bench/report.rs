//! Tables for people. Owns their text.

use std::io::{self, Write};

/// A table with a heading; all cells are text.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Self {
        Self { rows: vec![heading.iter().map(|&text| text.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Columns as wide as their widest cell.
    pub(crate) fn print(&self) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let mut output = io::stdout().lock();
        for row in &self.rows {
            for (cell, width) in row.iter().zip(&widths) {
                write!(output, "  {cell:<width$}")?;
            }
            writeln!(output)?;
        }
        writeln!(output)
    }
}
