from quantmla.report.markup import Markup, Number, el, join, number, numbers, table


def test_everything_is_escaped_but_markup():
    shown = el("p", "<b> & 'x'", el("b", "y"), class_='a"b', data_x=None)
    assert shown == '<p class="a&quot;b">&lt;b&gt; &amp; &#x27;x&#x27;<b>y</b></p>'


def test_coordinates_are_short():
    assert el("line", x1=1.23456, x2=2.0) == '<line x1="1.2" x2="2"/>'


def test_a_number_keeps_its_exact_value():
    assert number(0.123456, ".1%") == '<data value="0.123456">12.3%</data>'
    assert number(7, "d") == "7"  # as exact as it is
    assert number(7000, ",d") == "7,000"
    assert number(7000.4, ",.0f") == '<data value="7000.4">7,000</data>'
    assert number(None, ".1%") == "–"
    assert isinstance(number(None, ""), Number)


def test_several_numbers_leave_out_what_is_missing():
    shown = numbers((0.52, ".1f"), (None, ".1f"))
    assert shown == '<data value="0.52">0.5</data>'
    assert isinstance(shown, Number)


def test_numbers_of_a_table_are_set_right_and_rows_stand_out():
    shown = table(
        ("name", "n"), [["a", number(1, "d")], ["b", number(2, "d")]], caption="C", strong=[1]
    )
    assert '<th scope="col" class="w">name<th scope="col">n</thead>' in shown
    assert '<tr class="own"><td class=w>b<td>2</tbody>' in shown
    assert 'aria-label="C"' in shown


def test_join_leaves_out_none():
    assert join([Markup("<i></i>"), None, "<"]) == "<i></i>&lt;"
