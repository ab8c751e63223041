//! Handles the keys.

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::rows::{Sort, View};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Stay,
    Quit,
}

/// The list of keys, for the last line of the screen.
pub(crate) const HELP: &str =
    "sort by: o opened  p packets  b bytes  u unserved  f flows  n name   / filter   arrows scroll   q quit";

pub(crate) fn press(event: &Event, view: &mut View) -> Act {
    let Event::Key(key) = event else { return Act::Stay };
    if key.kind == KeyEventKind::Release {
        return Act::Stay;
    }
    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
        return Act::Quit;
    }
    if view.typing {
        edit(key.code, view);
        return Act::Stay;
    }
    match key.code {
        KeyCode::Char('q') => return Act::Quit,
        KeyCode::Esc => view.filter.clear(),
        KeyCode::Char('o' | 'c') => view.sort = Sort::Opened,
        KeyCode::Char('p') => view.sort = Sort::Packets,
        KeyCode::Char('b') => view.sort = Sort::Bytes,
        KeyCode::Char('u' | 'r') => view.sort = Sort::Unserved,
        KeyCode::Char('f') => view.sort = Sort::Flows,
        KeyCode::Char('n') => view.sort = Sort::Name,
        KeyCode::Char('/') => view.typing = true,
        KeyCode::Up => view.scroll = view.scroll.saturating_sub(1),
        KeyCode::Down => view.scroll = view.scroll.saturating_add(1),
        KeyCode::PageUp => view.scroll = view.scroll.saturating_sub(10),
        KeyCode::PageDown => view.scroll = view.scroll.saturating_add(10),
        KeyCode::Home => view.scroll = 0,
        _ => {}
    }
    Act::Stay
}

/// Edits the filter. Escape clears it.
fn edit(code: KeyCode, view: &mut View) {
    match code {
        KeyCode::Enter => view.typing = false,
        KeyCode::Esc => {
            view.typing = false;
            view.filter.clear();
        }
        KeyCode::Backspace => drop(view.filter.pop()),
        KeyCode::Char(letter) => view.filter.push(letter),
        _ => {}
    }
    view.scroll = 0;
}

#[cfg(test)]
mod tests {
    use crossterm::event::KeyEvent;

    use super::*;

    fn type_in(keys: &str, view: &mut View) -> Act {
        let press = |key| press(&Event::Key(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE)), view);
        keys.chars().map(press).last().unwrap_or(Act::Stay)
    }

    #[test]
    fn letters_sort_rows_or_edit_the_filter() {
        let mut view = View::default();
        assert_eq!((type_in("b", &mut view), view.sort), (Act::Stay, Sort::Bytes));
        assert_eq!((type_in("/qc", &mut view), view.sort), (Act::Stay, Sort::Bytes));
        assert_eq!(view.filter, "qc");
        press(&Event::Key(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE)), &mut view);
        assert_eq!(press(&Event::Key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE)), &mut view), Act::Stay);
        assert_eq!(view.filter, "", "Escape takes back, and does not end");
        assert_eq!(type_in("q", &mut view), Act::Quit);
    }

    #[test]
    fn control_c_quits_while_filter_is_typed() {
        let mut view = View { typing: true, ..View::default() };
        let key = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(press(&Event::Key(key), &mut view), Act::Quit);
    }
}
