"""The full-screen view of runs, with Textual.

A refresh reads new lines of the journals. Charts are drawn again only when a run has new lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.theme import Theme
from textual.widgets import DataTable, Footer, Static

from kohya_ext.errors import UserError
from kohya_ext.watching import colours, page, panels
from kohya_ext.watching.charts import Chart, draw_loss, draw_memory, draw_seconds
from kohya_ext.watching.colours import BACKGROUND, BORDER, FOOTER, FOREGROUND, LABEL, SELECTED
from kohya_ext.watching.page import View

_REST, _LONGEST = 30.0, 5.0
"""Smallest ratio of the time between two refreshes to the processor time of a refresh (3% of a core), up to these seconds."""

_PANELS = {"loss": "loss", "time": "time per step", "memory": "memory", "GPU": "GPU", "run": "run"}
"""Panels at the side and their titles."""

_THEME = Theme(
    name="kohya_ext",
    primary=colours.style(colours.BLUE),
    accent=colours.style(colours.ORANGE),
    foreground=FOREGROUND,
    background=BACKGROUND,
    surface=BACKGROUND,
    panel=FOOTER,
)


class RunTable(DataTable, can_focus=False):  # type: ignore[misc, call-arg]  # textual is not followed
    """The table of runs. Keys select a run through the application."""


class WatchApp(App[None]):  # type: ignore[misc]  # textual is not followed
    """The full-screen view. It reads in :meth:`refresh_views` and writes nothing."""

    TITLE = "kohya_ext watch"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: ClassVar = [(0, "-narrow"), (140, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar = [(0, "-low"), (38, "-high")]
    BINDINGS: ClassVar = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q", priority=True),
        Binding("l", "scale", "Logarithmic loss"),
        Binding("c", "chart", "Next chart"),
        Binding("down,j,n", "select(1)", "Next run", key_display="↓"),
        Binding("up,k,p", "select(-1)", "Previous run", key_display="↑"),
    ]
    CSS = f"""
    #runs {{ display: none; height: auto; max-height: 9; border: round {BORDER}; padding: 0 1; background: {BACKGROUND}; }}
    Screen.-several #runs {{ display: block; }}
    RunTable > .datatable--header {{ background: {BACKGROUND}; color: {LABEL}; text-style: none; }}
    RunTable > .datatable--even-row, RunTable > .datatable--odd-row {{ background: {BACKGROUND}; }}
    RunTable > .datatable--cursor {{ background: {SELECTED}; text-style: none; }}
    #progress {{ height: 3; margin: 0 1; }}
    .panel, Chart {{ border: round {BORDER}; border-title-color: {LABEL}; border-subtitle-color: {LABEL}; padding: 0 1; }}
    Chart {{ padding: 0; }}
    .panel {{ height: auto; }}
    .panel.-empty, .-low #run-panel {{ display: none; }}
    .-low .panel {{ border: none; border-top: solid {BORDER}; }}
    #body {{ height: 1fr; }}
    #side {{ width: 38; height: 1fr; scrollbar-size: 0 0; }}
    .-wide #side {{ width: 46; }}
    #small {{ height: 0.6fr; display: none; }}
    .-wide.-high #small {{ display: block; }}
    #bottom {{ height: 6; }}
    .-low.-several #bottom {{ height: 4; }}
    .-low.-several #loss-panel {{ display: none; }}
    .-high #bottom {{ height: 11; }}
    #events, #command {{ width: 1fr; height: 1fr; }}
    #command {{ display: none; }}
    .-wide #command {{ display: block; }}
    #hint {{ height: auto; max-height: 3; margin: 0 1; color: {LABEL}; }}
    .-wide #hint {{ display: none; }}
    """

    def __init__(self, read: Callable[[], list[View]], views: list[View], interval: float) -> None:
        """``read`` returns the current views; it is called every ``interval`` seconds."""
        super().__init__()
        self._read, self._views, self._interval = read, views, interval
        self._selected = views[0].file
        """The journal of the shown run."""
        self._logarithmic = False
        self._chart = 0
        """The chart in the large place if there is only one."""
        self._shown: object = None
        """What the panels show, to update them only when it changes."""
        self._next = 0.0
        """Time of the next refresh."""
        self._used: float | None = None
        """Processor time before the last refresh; None before the first one."""
        self._drawn: object = None
        """What the charts show, to draw them only when it changes."""

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield RunTable(id="runs", cursor_type="row", cursor_foreground_priority="renderable")
        yield Static(id="progress")
        with Horizontal(id="body"):
            with Vertical():
                yield Chart(id="main")
                with Horizontal(id="small"):
                    yield Chart(id="seconds")
                    yield Chart(id="memory")
            with VerticalScroll(id="side", can_focus=False):
                for name in _PANELS:
                    yield Static(id=f"{name}-panel", classes="panel")
        with Horizontal(id="bottom"):
            yield Static(id="events", classes="panel")
            yield Static(id="command", classes="panel")
        yield Static(id="hint")
        yield Footer()

    def on_mount(self) -> None:
        """Start the refreshes."""
        self.register_theme(_THEME)
        self.theme = _THEME.name
        for name, title in _PANELS.items():
            self.query_one(f"#{name}-panel").border_title = title
        self.query_one("#events").border_title = "events"
        self.query_one("#command").border_title = "next"
        self.query_one("#runs", RunTable).add_columns("run", "status", "progress", "left", "s per step", "loss")
        self.set_interval(self._interval, self.refresh_views)
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._drawn = None
        self.call_after_refresh(self.show)

    def refresh_views(self) -> None:
        """Read the journals and show them if they have changed."""
        used, now = time.process_time(), time.monotonic()
        if now < self._next or not self.query("#hint"):  # or the widgets are not mounted yet
            return
        self._next = now + min((used - (self._used or used)) * _REST, _LONGEST)
        self._used = used
        try:
            self._views = self._read()
        except UserError as problem:
            self.query_one("#hint", Static).update(Text(str(problem), style="red"))
            return
        shown = [(view.file, view.row["status"], view.log.time, len(view.log.steps), view.gpu) for view in self._views]
        if shown != self._shown:
            self._shown = shown
            self.show()

    def action_scale(self) -> None:
        """Switch the loss between a linear and a logarithmic scale."""
        self._logarithmic = not self._logarithmic
        self.show()

    def action_chart(self) -> None:
        """Show the next chart in the large place."""
        self._chart = (self._chart + 1) % 3
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible; Textual hides the keys of others."""
        return action != "select" or len(self._views) > 1

    def action_select(self, change: int) -> None:
        """Show the next or previous run."""
        files = [view.file for view in self._views]
        self._selected = files[(files.index(self._selected) + change) % len(files)]
        self.show()

    def on_data_table_row_selected(self, event: Any) -> None:
        """Show the run that the mouse has selected in the table."""
        if event.row_key.value is not None:
            self._selected = Path(event.row_key.value)
            self.show()

    # --- show --------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show the current views."""
        view = next(view for view in self._views if view.file == self._selected)
        self._show_runs()
        self._show_panels(view)
        drawn = (self._selected, len(view.log.steps), view.log.time, self._logarithmic, self._chart, self.size)
        if drawn != self._drawn:
            self._drawn = drawn
            self._show_charts(view)

    def _show_runs(self) -> None:
        table = self.query_one("#runs", RunTable)
        self.screen.set_class(len(self._views) > 1, "-several")
        if len(self._views) < 2:
            return
        rows = [(str(view.file), panels.run_row(view)) for view in self._views]
        if [key.value for key in table.rows] != [name for name, _ in rows]:
            table.clear()
            for name, cells in rows:
                table.add_row(*cells, key=name)
        else:
            for index, (_, cells) in enumerate(rows):
                for column, cell in enumerate(cells):
                    if table.get_cell_at((index, column)) != cell:
                        table.update_cell_at((index, column), cell)
        table.move_cursor(row=[name for name, _ in rows].index(str(self._selected)))

    def _show_panels(self, view: View) -> None:
        progress = self.query_one("#progress", Static)
        progress.update(panels.progress_panel(view, max(progress.size.width, 20)))
        width = max(int(self.query_one("#side").size.width) - 4, 10)
        for name, parts in (
            ("loss", panels.loss_panel(view)),
            ("time", panels.time_panel(view, width)),
            ("memory", panels.memory_panel(view, width)),
            ("GPU", panels.gpu_panel(view.gpu, width)),
            ("run", panels.run_panel(view)),
        ):
            panel, shown = self.query_one(f"#{name}-panel", Static), list(parts)
            panel.set_class(not shown, "-empty")
            panel.update(Group(*shown))
        events = self.query_one("#events", Static)
        following, profile = page.command(view) or Text("nothing to do", style="dim"), panels.profile_line(view)
        newest: list[Text] = [panels.event(line) for line in [*view.log.events][-max(events.content_size.height, 1) :]]
        events.update(Group(*newest or [Text("none", style="dim")]))
        advice = [Text(line, style="bold" if not index else "") for index, line in enumerate(page.profile(view.log))]
        self.query_one("#command", Static).update(Group(*advice, *([Text()] if advice else []), following))
        # Narrow terminals have no place for both.
        hint = profile if profile and view.is_running else " ".join(following.plain.splitlines())
        self.query_one("#hint", Static).update(Text(hint, overflow="fold"))

    def _show_charts(self, view: View) -> None:
        log, row = view.log, view.row
        draw: tuple[Callable[[Chart], None], ...] = (
            lambda chart: draw_loss(chart, log, self._logarithmic),
            lambda chart: draw_seconds(chart, log, row["seconds_per_step"]["predicted"]),
            lambda chart: draw_memory(chart, log, row["memory"]),
        )
        charts = [self.query_one(f"#{name}", Chart) for name in ("main", "seconds", "memory")]
        for index, chart in enumerate(charts):
            which = (index + self._chart) % 3
            if index and not self.query_one("#small").display:
                continue
            draw[which](chart)
