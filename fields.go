package redislock

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/tidwall/gjson"
)

// fields are the values in a request's body that templates ask for, by their placeholders.
type fields struct {
	json map[string][]string // {http.redis_lock.json.<path>}: the path's steps
	form map[string]string   // {http.redis_lock.form.<field>}: the field
}

// newFields finds the placeholders in templates.
func newFields(templates []string) (fields, error) {
	f := fields{make(map[string][]string), make(map[string]string)}
	for _, template := range templates {
		// The replacer itself says what is a placeholder to it: braces can be escaped.
		_, err := caddy.NewEmptyReplacer().ReplaceFunc(template, func(placeholder string, _ any) (any, error) {
			if err := f.add(placeholder); err != nil {
				return nil, fmt.Errorf("{%s} %w", placeholder, err)
			}
			return nil, nil
		})
		if err != nil {
			return fields{}, err
		}
	}
	return f, nil
}

// varies is true if the template is not the same text for all requests.
func varies(template string) (found bool) {
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(template, func(placeholder string, _ any) (any, error) {
		kind, _, _ := strings.Cut(placeholder, ".")
		found = found || kind != "env" && kind != "file" && kind != "system"
		return nil, nil
	})
	return found
}

func (f fields) add(placeholder string) error {
	if strings.HasPrefix(placeholder, "redis_lock.") {
		return errors.New("is unknown; ours begin with http.redis_lock.")
	}
	key, ours := strings.CutPrefix(placeholder, "http.redis_lock.")
	kind, path, _ := strings.Cut(key, ".")
	switch {
	case !ours || slices.Contains(reported, key): // of a redis_lock around this one
		return nil
	case kind != "json" && kind != "form":
		return errors.New("is unknown; in the body there are {http.redis_lock.json.<path>} and {http.redis_lock.form.<field>}")
	}
	if strings.ContainsRune(path, utf8.RuneError) {
		return errors.New("is not valid UTF-8; it would match nothing")
	}
	steps, err := splitPath(path)
	if err != nil {
		return err
	}
	if kind == "form" {
		if path == "" {
			return errors.New("has no field; name the one to use, such as {http.redis_lock.form.CallSid}")
		}
		f.form[placeholder] = strings.Join(steps, ".") // dots are part of a field's name
		return nil
	}
	if slices.Contains(steps, "") {
		return errors.New(`has an empty key; write keys with one dot between, such as {http.redis_lock.json.repository.id}, and \. for a dot in a key`)
	}
	if strings.HasSuffix(path, "]") && !strings.HasSuffix(path, `\]`) || strings.Contains(path, "].") {
		return errors.New(`has an index in brackets; write changes.0.name, and \] for a bracket in a key`)
	}
	f.json[placeholder] = steps
	return nil
}

// splitPath splits a path at its dots. A backslash makes the character behind it an ordinary one:
// a dot, or a brace, which must be escaped for the replacer.
func splitPath(path string) (steps []string, err error) {
	var step strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] == '.' {
			steps = append(steps, step.String())
			step.Reset()
			continue
		}
		if path[i] == '\\' {
			if i++; i == len(path) {
				return nil, errors.New(`ends with a backslash; write \\ for one in a key`)
			}
		}
		step.WriteByte(path[i])
	}
	return append(steps, step.String()), nil
}

func (f fields) none() bool { return len(f.json)+len(f.form) == 0 }

// set gives each placeholder its value, which is empty if it does not resolve. The values are
// copies: a piece of the body would keep all of it in memory for as long as the request lasts.
func (f fields) set(repl *caddy.Replacer, header http.Header, body []byte) {
	if len(f.json) > 0 {
		root := parseJSON(body)
		for placeholder, path := range f.json {
			repl.Set(placeholder, strings.Clone(jsonValue(root, path)))
		}
	}
	if len(f.form) > 0 {
		form := parseForm(header, body)
		for placeholder, field := range f.form {
			repl.Set(placeholder, strings.Clone(formValue(form[field])))
		}
	}
}

// parseJSON does not look at the Content-Type, which senders get wrong. gjson does not care
// whether JSON is valid. encoding/json does, and bounds its depth, too.
func parseJSON(body []byte) gjson.Result {
	if !json.Valid(body) {
		return gjson.Result{}
	}
	return gjson.ParseBytes(body)
}

// jsonValue returns the string, the number as it is written, true or false at the end of the path.
func jsonValue(value gjson.Result, path []string) string {
	for _, step := range path {
		value = jsonChild(value, step)
	}
	switch value.Type {
	case gjson.String:
		return decoded(value.Str)
	case gjson.Number, gjson.True, gjson.False:
		return value.Raw
	}
	return ""
}

// jsonChild returns what an object has for a key, or an array at an index. A key that occurs twice
// has no value: the app may take the one for it that was not taken here. To many apps, keys that differ
// in their case are the same.
func jsonChild(parent gjson.Result, step string) (child gjson.Result) {
	found := 0
	parent.ForEach(func(key, value gjson.Result) bool {
		name := key.Str
		if key.Type == gjson.Number { // in an array
			name = strconv.Itoa(int(key.Num))
		}
		if name == step {
			child = value
		}
		if strings.EqualFold(name, step) {
			found++
		}
		return true
	})
	if found != 1 {
		return gjson.Result{}
	}
	return child
}

// parseForm returns no values unless the body is an urlencoded form. If a part of it is malformed,
// such as an escape, the fields beside it still count: apps see them as well.
func parseForm(header http.Header, body []byte) url.Values {
	if kind, _, _ := mime.ParseMediaType(header.Get("Content-Type")); kind != "application/x-www-form-urlencoded" {
		return nil
	}
	form, _ := url.ParseQuery(string(body))
	return form
}

// formValue returns the value of a field. Given twice it has none, unless they are the same: the app
// may take the other one.
func formValue(values []string) string {
	for _, value := range values {
		if value != values[0] {
			return ""
		}
	}
	if len(values) == 0 {
		return ""
	}
	return decoded(values[0])
}

// decoded returns a text, unless a part of it could not be decoded (bytes that are not UTF-8, half of
// a surrogate pair): different ones would become the same.
func decoded(text string) string {
	if strings.ContainsRune(text, utf8.RuneError) {
		return ""
	}
	return text
}
