//! Draws the screen: a header, tabs, one table, and the keys.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};

use super::asker::Reading;
use super::screen::{Screen, Tab};
use super::tables::{Rows, rows};
use crate::tools::units::{bits, bytes, count, duration, rate};

/// Draws everything. How far the table is scrolled is limited to what there is.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &mut Screen) {
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(HEADER_LINES),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(1),
    ]);
    let [title, header, tabs, body, keys] = areas.areas(frame.area());
    frame.render_widget(title_line(screen), title);
    frame.render_widget(tab_line(screen), tabs);
    frame.render_widget(key_line(screen), keys);
    let Some(reading) = screen.reading.take() else {
        let word = if screen.failure.is_some() { "nothing is known yet" } else { "asking …" };
        frame.render_widget(Paragraph::new(word).dim(), body);
        return;
    };
    draw_header(frame, &reading, header);
    let rows = rows(screen, &reading);
    let room = usize::from(body.height.saturating_sub(2)).max(1);
    screen.scrolled = screen.scrolled.min(rows.rows.len().saturating_sub(room));
    let is_stale = screen.failure.is_some();
    draw_table(frame, &rows, body, screen.scrolled, is_stale);
    screen.reading = Some(reading);
}

/// Who it is, and whether it answers.
fn title_line(screen: &Screen) -> Line<'static> {
    let mut line = Line::from(vec!["smcgate".bold()]);
    if let Some(reading) = &screen.reading {
        let up = duration(reading.stats.uptime_s as f64);
        line.push_span(format!(" {}  up {up}", reading.stats.version));
    }
    line.push_span(format!("  at {}  ", screen.admin).dim());
    line.push_span(match (&screen.failure, &screen.reading) {
        (Some(why), _) => {
            Span::styled(format!(" NO ANSWER: {why} "), Style::new().white().on_red().bold())
        }
        (None, Some(_)) => "live".green(),
        (None, None) => "asking".yellow(),
    });
    line
}

fn tab_line(screen: &Screen) -> Line<'static> {
    let name = |(index, tab): (usize, &Tab)| {
        let style = if *tab == screen.tab {
            Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
        } else {
            Style::new()
        };
        [Span::styled(format!(" {} {} ", index + 1, tab.name()), style), " ".into()]
    };
    Line::from_iter(Tab::ALL.iter().enumerate().flat_map(name))
}

fn key_line(screen: &Screen) -> Line<'static> {
    if screen.is_typing {
        let filter = format!("{}▏", screen.filter);
        return Line::from(vec!["filter: ".bold(), filter.into(), "  Enter keep  Esc clear".dim()]);
    }
    let order = format!(" sort ({})  ", screen.order.name());
    let mut line = Line::from(vec![
        "q".bold(),
        " quit  ".into(),
        "1-7 Tab".bold(),
        " pane  ".into(),
        "↑↓ PgUp PgDn".bold(),
        " scroll  ".into(),
        "s".bold(),
        order.into(),
        "/".bold(),
        " filter".into(),
    ]);
    if !screen.filter.is_empty() {
        line.push_span(format!(": {}  ", screen.filter).yellow());
        line.push_span("Esc".bold());
        line.push_span(" clear");
    }
    line
}

/// Throughput with its last minutes, and connections.
fn draw_header(frame: &mut Frame<'_>, reading: &Reading, area: Rect) {
    let Reading { stats, history, .. } = reading;
    let areas: [Rect; HEADER_LINES as usize] =
        Layout::vertical([Constraint::Length(1); HEADER_LINES as usize]).areas(area);
    for (area, name, sums, total, color) in [
        (areas[0], "in ", &history.bytes_in, stats.totals.bytes_in, Color::Blue),
        (areas[1], "out", &history.bytes_out, stats.totals.bytes_out, Color::Yellow),
    ] {
        let rates = history.rates(sums);
        let now = rates.last().map_or("-".to_owned(), |(_, rate)| bits(*rate));
        let [words, plot] =
            Layout::horizontal([Constraint::Length(42), Constraint::Min(0)]).areas(area);
        let total = format!("{} in all", bytes(total as f64));
        let line = Line::from(vec![
            format!("{name}  ").into(),
            format!("{now:<14}").fg(color).bold(),
            total.dim(),
        ]);
        frame.render_widget(line, words);
        frame.render_widget(sparkline(&rates, plot.width).fg(color), plot);
    }
    let latest = |sums: &[u64]| {
        history.rates(sums).last().map_or("-".to_owned(), |(_, per_second)| rate(*per_second))
    };
    let active = &stats.active;
    frame.render_widget(
        Line::from(vec![
            "open ".into(),
            format!("{} smc-r", count(active.smc)).fg(Color::Blue).bold(),
            format!(", {} tcp", count(active.tcp)).fg(Color::Yellow).bold(),
            format!(
                ", {} connecting, {} waiting, {} closing, {} parked",
                count(active.connecting),
                count(active.waiting),
                count(active.farewells),
                count(active.parked)
            )
            .into(),
        ]),
        areas[2],
    );
    let line = format!(
        "new  {} smc-r, {} tcp; since the start {} smc-r, {} tcp, of which {} fell back",
        latest(&history.connections_smc),
        latest(&history.connections_tcp),
        count(stats.totals.connections_smc),
        count(stats.totals.connections_tcp),
        count(stats.fallbacks.iter().map(|reason| reason.count).sum()),
    );
    frame.render_widget(line, areas[3]);
}

/// The newest rates, the last one at the right end.
fn sparkline(rates: &[(u64, f64)], width: u16) -> Sparkline<'static> {
    let newest = rates.len().saturating_sub(usize::from(width));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes a second")]
    let bars = rates[newest..].iter().map(|(_, rate)| *rate as u64);
    Sparkline::default().data(bars.collect::<Vec<_>>())
}

fn draw_table(frame: &mut Frame<'_>, rows: &Rows, area: Rect, skip: usize, is_stale: bool) {
    let [area, note] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(area);
    frame.render_widget(Line::from(rows.note.clone()).dim(), note);
    if rows.rows.is_empty() {
        return;
    }
    let cells = |index: usize| rows.rows.iter().filter_map(move |row| row.get(index));
    let width = |index: usize| {
        let widest = cells(index).map(|cell| cell.chars().count()).max().unwrap_or(0);
        let widest = widest.max(rows.head[index].len());
        Constraint::Length(u16::try_from(widest).unwrap_or(u16::MAX))
    };
    let body = rows.rows.iter().skip(skip).map(|row| {
        let cells = row.iter().map(|cell| Cell::from(cell.clone()).style(mood(cell)));
        Row::new(cells)
    });
    let style = if is_stale { Style::new().dim() } else { Style::new() };
    let table = Table::new(body, (0..rows.head.len()).map(width))
        .header(Row::new(rows.head.clone()).bold().underlined())
        .column_spacing(2)
        .style(style);
    frame.render_widget(table, area);
}

/// States have colours; so has the transport.
fn mood(cell: &str) -> Style {
    match cell {
        "smc-r" => Style::new().fg(Color::Blue),
        "tcp" => Style::new().fg(Color::Yellow),
        "up" | "open" => Style::new().fg(Color::Green),
        "down" | "out" | "removed" => Style::new().fg(Color::Red).bold(),
        "drained" | "probing" | "confirming" => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}

const HEADER_LINES: u16 = 4;
